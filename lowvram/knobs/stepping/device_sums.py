"""Gradients in few bits on the device: sums over the parts of a step, without a copy to the host.

After each part a sum is rounded to one of its two neighbours at random, so that on average nothing is lost (Gupta et
al., "Deep Learning with Limited Numerical Precision", 2015). The int8 codes have a scale per block, as in Dettmers et
al., "8-bit Optimizers via Block-wise Quantization" (2021). What rounding drops isn't kept for the next part (error
feedback): that would take the memory which few bits save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core.knob import Kind
from lowvram.core.ledger import announce
from lowvram.core.rounding import noise_of, stochastically
from lowvram.core.shards import SquareSum, local
from lowvram.knobs.stepping.sums import Sums

PIECE_NUMEL = 2**20  # of a gradient that are in fp32 at a time, in several tensors of 4 MiB
BLOCK_NUMEL = 64  # with one scale
MOST = 127  # the largest code


class FewBits(ABC):
    """`numel` numbers, kept in few bits."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """The numbers from `start` to `end` in fp32."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Replace the numbers from `start` on by `values` (fp32), rounded at random."""


@final
class Bf16(FewBits):
    """2 bytes for a number."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.values = announce(torch.empty(numel, dtype=torch.bfloat16, device=device), Kind.GRADIENTS)

    def read(self, start: int, end: int) -> Tensor:
        return self.values[start:end].float()

    def write(self, start: int, values: Tensor) -> None:
        stochastically(self.values[start : start + len(values)], values)


@final
class Int8(FewBits):
    """1 byte for a number, and a scale in bf16 for each block of 64. A number is off by less than 1/127 of the largest
    in its block. A block with a number that isn't finite is read as nan."""

    def __init__(self, numel: int, device: torch.device) -> None:
        num_blocks = -(-numel // BLOCK_NUMEL)
        self.codes_bk = announce(torch.empty(num_blocks, BLOCK_NUMEL, dtype=torch.int8, device=device), Kind.GRADIENTS)
        self.scales_b = announce(torch.empty(num_blocks, 1, dtype=torch.bfloat16, device=device), Kind.GRADIENTS)

    def read(self, start: int, end: int) -> Tensor:
        blocks = slice(start // BLOCK_NUMEL, -(-end // BLOCK_NUMEL))
        values_bk = self.codes_bk[blocks].float().mul_(self.scales_b[blocks])
        return values_bk.view(-1)[: end - start]

    def write(self, start: int, values: Tensor) -> None:
        rest = -len(values) % BLOCK_NUMEL
        values_bk = (nn.functional.pad(values, (0, rest)) if rest else values).view(-1, BLOCK_NUMEL)
        blocks = slice(start // BLOCK_NUMEL, start // BLOCK_NUMEL + len(values_bk))
        largest_b = torch.linalg.vector_norm(values_bk, torch.inf, dim=1, keepdim=True)
        self.scales_b[blocks] = largest_b.mul_((1 + 2**-7) / MOST)  # not below it when rounded to bf16
        codes_bk = values_bk / self.scales_b[blocks].float().clamp_(min=torch.finfo(torch.float32).tiny)
        codes_bk.add_(torch.rand_like(codes_bk)).floor_().nan_to_num_().clamp_(-MOST, MOST)
        self.codes_bk[blocks] = codes_bk.to(torch.int8)


@final
class DeviceSums(Sums):
    """The gradients of the current step, each summed over the step's parts in few bits on its device. Memory lasts from
    a parameter's first gradient of a step until it is used. Of a sharded parameter only this rank's shard is kept.

    Args:
        make: makes room for a gradient of so many elements on a device.
    """

    def __init__(self, make: Callable[[int, torch.device], FewBits]) -> None:
        self.make = make
        self.num_steps = self.num_taken = 0  # steps so far, and gradients in this one: the seeds of the noise
        self._sums: dict[nn.Parameter, FewBits] = {}

    def begin(self, num_parts: int) -> None:
        self._sums.clear()
        self.num_steps, self.num_taken = self.num_steps + 1, 0

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = flat(local(parameter.grad)), None
        is_first = parameter not in self._sums
        if is_first:
            self._sums[parameter] = self.make(gradient.numel(), gradient.device)
        total = self._sums[parameter]
        self.num_taken += 1
        with noise_of(gradient.device, self.num_steps, self.num_taken):
            for start, end in pieces(gradient.numel()):
                piece = gradient[start:end].float()
                total.write(start, piece if is_first else total.read(start, end).add_(piece))

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
        return list(self._sums)

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

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


def flat(gradient: Tensor) -> Tensor:
    """A view of one dimension, in the order in memory: gradients have their parameter's layout, without gaps."""
    return gradient.as_strided((gradient.numel(),), (1,))


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """First element and end of each run of elements that is in fp32 at a time: whole blocks, but for the last."""
    for start in range(0, numel, PIECE_NUMEL):
        yield start, min(start + PIECE_NUMEL, numel)
