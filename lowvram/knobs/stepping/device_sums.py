"""Gradients in few bits on the device: sums over the parts of a step, without a copy to the host.

After each part a sum is rounded to one of its two neighbours at random, so that on average nothing is lost (Gupta et
al., "Deep Learning with Limited Numerical Precision", 2015). The int8 codes have a scale per block, as in Dettmers et
al., "8-bit Optimizers via Block-wise Quantization" (2021). What rounding drops isn't kept for the next part (error
feedback): that would take the memory which few bits save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from math import gcd
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.core.fused import fused
from lowvram.core.gradient_sink import GradientSink
from lowvram.core.knob import Kind
from lowvram.core.ledger import announce
from lowvram.core.rounding import MOST_SEEDS, bits_at_random
from lowvram.core.seeds import seed_of
from lowvram.core.shards import SquareSum, local
from lowvram.knobs.stepping.sums import Sums

PIECE_NUMEL = 2**20  # of a gradient that are in fp32 at a time, in several tensors of 4 MiB
BLOCK_NUMEL = 128  # with one scale
ALIGNED_NUMEL = 4 * BLOCK_NUMEL  # whose scales take 16 bytes: compiled kernels copy what isn't aligned to so many
MOST = 127  # the largest code
LOW_BITS = 2**16  # the values of those bits of an fp32 number that bf16 drops


class Total(ABC):
    """The sums of a parameter's `numel` gradients, in some number format; 0 at first."""

    @abstractmethod
    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        """Add values (n,) to the sums from `start` on, where a block begins. In few bits these sums are then rounded at
        random. The values end where a block ends, or with the last sum."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """The sums from `start` to `end` in fp32."""


@final
class Fp32(Total):
    """4 bytes for a number, and nothing rounded: for vectors, which take little memory, and a card's time for each sum
    is mostly its host's."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.sums = announce(torch.zeros(numel, device=device), Kind.GRADIENTS)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        self.sums[start : start + len(values)].add_(values)

    def read(self, start: int, end: int) -> Tensor:
        return self.sums[start:end].clone()


@final
class Bf16(Total):
    """2 bytes for a number."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.sums = announce(torch.zeros(numel, dtype=torch.bfloat16, device=device), Kind.GRADIENTS)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        add_in_bf16(self.sums[start : start + len(values)], values, seed)

    def read(self, start: int, end: int) -> Tensor:
        return self.sums[start:end].float()


def to_bf16(sums: Tensor, values: Tensor, seed: int) -> None:
    exact = sums.float() + values.float()
    noise = bits_at_random(len(exact), seed, exact.device).to(torch.int16)  # a kernel of torch 2.11 has 64 bits here
    noise = noise.to(torch.int32) & (LOW_BITS - 1)
    bits = torch.where(exact.isfinite(), exact.view(torch.int32) + noise, exact.view(torch.int32))
    sums.copy_((bits & -LOW_BITS).view(torch.float32))


def to_bf16_in_pieces(sums: Tensor, values: Tensor, seed: int) -> None:
    for start, end in pieces(len(sums)):
        to_bf16(sums[start:end], values[start:end], seed + start)


add_in_bf16 = fused("add_in_bf16(Tensor(a!) sums, Tensor values, int seed) -> ()", to_bf16, to_bf16_in_pieces)


@final
class Int8(Total):
    """1 byte for a number, and a scale in fp32 for each block of 128. A number is off by less than 1/127 of the largest
    in its block. A block with a number that isn't finite is read as nan."""

    def __init__(self, numel: int, device: torch.device) -> None:
        num_blocks = -(-numel // BLOCK_NUMEL)
        self.codes_bk = announce(torch.zeros(num_blocks, BLOCK_NUMEL, dtype=torch.int8, device=device), Kind.GRADIENTS)
        self.scales_b = announce(torch.zeros(num_blocks, 1, device=device), Kind.GRADIENTS)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        blocks = blocks_of(start, start + len(values))
        add_in_int8(self.codes_bk[blocks], self.scales_b[blocks], values, seed)

    def read(self, start: int, end: int) -> Tensor:
        blocks = blocks_of(start, end)
        return (self.codes_bk[blocks] * self.scales_b[blocks]).view(-1)[: end - start]


def to_int8(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    padded = nn.functional.pad(values.float(), (0, codes_bk.numel() - len(values)))
    exact_bk = codes_bk * scales_b + padded.view(-1, BLOCK_NUMEL)
    scales = exact_bk.abs().amax(1, keepdim=True) / MOST
    scaled_bk = exact_bk / scales.clamp(min=torch.finfo(torch.float32).tiny)
    noise_bk = bits_at_random(codes_bk.numel(), seed, codes_bk.device).view(-1, BLOCK_NUMEL) * 2.0**-24
    scales_b.copy_(scales)
    codes_bk.copy_((scaled_bk + noise_bk).floor().nan_to_num().clamp(-MOST, MOST))


def to_int8_in_pieces(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    for start, end in pieces(len(values)):
        blocks = blocks_of(start, end)
        to_int8(codes_bk[blocks], scales_b[blocks], values[start:end], seed + start)


def blocks_of(start: int, end: int) -> slice:
    """The blocks of the numbers from `start`, where one begins, to `end`."""
    return slice(start // BLOCK_NUMEL, -(-end // BLOCK_NUMEL))


add_in_int8 = fused(
    "add_in_int8(Tensor(a!) codes_bk, Tensor(b!) scales_b, Tensor values, int seed) -> ()", to_int8, to_int8_in_pieces
)


@final
class DeviceSums(Sums):
    """The gradients of the current step, each summed over the step's parts in few bits on its device; those of vectors
    (biases, scales of norms) in fp32. Memory lasts from a parameter's first gradient of a step until it is used. Of a
    sharded parameter only this rank's shard is kept.

    Args:
        make: makes room for the gradient of a matrix, of so many elements, on a device.
    """

    def __init__(self, make: Callable[[int, torch.device], Total]) -> None:
        self.make = make
        self.num_steps = self.num_taken = 0  # steps so far, and additions in this one: the seeds of the noise
        self._sums: dict[nn.Parameter, Total] = {}

    def begin(self, num_parts: int) -> None:
        self._sums.clear()
        self.num_steps, self.num_taken = self.num_steps + 1, 0

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = flat(local(parameter.grad)), None
        self.add(parameter, gradient)

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        is_plain = not isinstance(parameter, DTensor) and parameter.is_contiguous()
        return RowSink(self, parameter) if is_plain else None

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, values: Tensor, start: int = 0) -> None:
        """Add the elements (n,) from `start` on of a gradient, in the order in memory."""
        if parameter not in self._sums:
            make = self.make if parameter.ndim > 1 else Fp32
            self._sums[parameter] = make(local(parameter).numel(), values.device)
        self.num_taken += 1
        self._sums[parameter].add(values, seed_of(f"{self.num_steps}:{self.num_taken}") % MOST_SEEDS, start)

    @torch.no_grad()
    def add_to(self, parameter: nn.Parameter) -> None:
        """Add the sum of the earlier parts to the parameter's gradient, and drop the sum."""
        if (total := self._sums.pop(parameter, None)) is not None:
            assert parameter.grad is not None
            gradient = flat(local(parameter.grad))
            for start, end in pieces(gradient.numel()):
                piece = gradient[start:end]
                piece.copy_(total.read(start, end).add_(piece))

    def with_gradient(self) -> list[nn.Parameter]:
        """The smallest first: when the largest is brought back, the sums of the others are free."""
        return sorted(self._sums, key=nn.Parameter.numel)

    @torch.no_grad()
    def squares(self) -> SquareSum:
        squares = SquareSum()
        for parameter, total in self._sums.items():
            numel = local(parameter).numel()
            norms = [torch.linalg.vector_norm(total.read(start, end)) for start, end in pieces(numel)]
            norms = norms or [torch.zeros((), device=local(parameter).device)]  # a rank without a shard
            squares.add_norm(torch.linalg.vector_norm(torch.stack(norms)), parameter)
        return squares

    @torch.no_grad()
    def bring_back(self, parameter: nn.Parameter) -> None:
        total, gradient = self._sums.pop(parameter), torch.empty_like(parameter, requires_grad=False)
        for start, end in pieces(local(gradient).numel()):
            flat(local(gradient))[start:end] = total.read(start, end)
        parameter.grad = announce(gradient, Kind.GRADIENTS)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@final
class RowSink(GradientSink):
    """Adds rows of a parameter's gradient to its sum."""

    def __init__(self, sums: DeviceSums, parameter: nn.Parameter) -> None:
        self.sums, self.parameter, self.width = sums, parameter, parameter[0].numel()
        super().__init__(row_multiple=ALIGNED_NUMEL // gcd(ALIGNED_NUMEL, self.width))

    def add(self, rows: slice, piece: Tensor) -> None:
        self.sums.add(self.parameter, flat(announce(piece, Kind.GRADIENTS)), rows.start * self.width)


def flat(gradient: Tensor) -> Tensor:
    """A view of one dimension, in the order in memory: gradients have their parameter's layout, without gaps."""
    return gradient.as_strided((gradient.numel(),), (1,))


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """First element and end of each run of elements that is in fp32 at a time: whole blocks, but for the last."""
    for start in range(0, numel, PIECE_NUMEL):
        yield start, min(start + PIECE_NUMEL, numel)
