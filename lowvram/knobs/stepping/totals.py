"""Sums of gradients in few bits, and in fp32: on the device, without a copy to the host.

After each addition a sum is rounded to one of its two neighbours at random, so that on average nothing is lost (Gupta
et al., "Deep Learning with Limited Numerical Precision", 2015). The int8 codes have a scale per block, as in Dettmers
et al., "8-bit Optimizers via Block-wise Quantization" (2021). What rounding drops isn't kept for the next addition
(error feedback): that would take the memory which few bits save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core.fused import fused
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.rounding import bits_at_random

PIECE_NUMEL = 2**20  # of a gradient that are in fp32 at a time, in several tensors of 4 MiB
BLOCK_NUMEL = 128  # with one scale
ALIGNED_NUMEL = 4 * BLOCK_NUMEL  # whose scales take 16 bytes: compiled kernels copy what isn't aligned to so many
MOST = 127  # the largest code
LOW_BITS = 2**16  # the values of those bits of an fp32 number that bf16 drops


class Total(ABC):
    """The sums of a parameter's `numel` gradients, in some number format; 0 at first."""

    @abstractmethod
    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        """Add values, of any shape without gaps, in their order in memory, to the sums from `start` on, where a block
        begins. In few bits these sums are then rounded at random. The values end where a block ends, or with the last
        sum."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """The sums from `start` to `end` in fp32, to be read alone."""

    @abstractmethod
    def add_to(self, gradient: Tensor) -> None:
        """Add the sums to a gradient (numel,), which is rounded to its own dtype once."""


@final
class Fp32(Total):
    """4 bytes for a number, and nothing rounded.

    Args:
        sums: (numel,) fp32: the first ones, written to later.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = announce(sums, Kind.GRADIENTS)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        self.sums[start : start + values.numel()].add_(flat(values))

    def read(self, start: int, end: int) -> Tensor:
        return self.sums if end - start == len(self.sums) else self.sums[start:end]

    def add_to(self, gradient: Tensor) -> None:
        gradient.add_(self.sums)


@final
class Bf16(Total):
    """2 bytes for a number."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.sums = announce(torch.zeros(numel, dtype=torch.bfloat16, device=device), Kind.GRADIENTS)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        is_all = values.numel() == len(self.sums)
        add_in_bf16(self.sums if is_all else self.sums[start : start + values.numel()], values, seed)

    def read(self, start: int, end: int) -> Tensor:
        return self.sums[start:end].float()

    def add_to(self, gradient: Tensor) -> None:
        gradient.add_(self.sums)


def to_bf16(sums: Tensor, values: Tensor, seed: int) -> None:
    exact = sums.float() + values.float()
    noise = bits_at_random(len(exact), seed, exact.device).to(torch.int16)  # a kernel of torch 2.11 has 64 bits here
    noise = noise.to(torch.int32) & (LOW_BITS - 1)
    bits = torch.where(exact.isfinite(), exact.view(torch.int32) + noise, exact.view(torch.int32))
    sums.copy_((bits & -LOW_BITS).view(torch.float32))


def to_bf16_in_pieces(sums: Tensor, values: Tensor, seed: int) -> None:
    values = flat(values)
    for start, end in pieces(len(sums)):
        to_bf16(sums[start:end], values[start:end], seed + start)


def launch_bf16(sums: Tensor, values: Tensor, seed: int) -> None:
    kernels().add_in_bf16(sums, values, seed)


add_in_bf16 = fused(
    "add_in_bf16(Tensor(a!) sums, Tensor values, int seed) -> ()", to_bf16, to_bf16_in_pieces, launch_bf16
)


@final
class Int8(Total):
    """1 byte for a number, and a scale in fp32 for each block of 128. A number is off by less than 1/127 of the largest
    in its block. A block with a number that isn't finite is read as nan."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, num_blocks = numel, -(-numel // BLOCK_NUMEL)
        self.codes_bk = announce(torch.empty(num_blocks, BLOCK_NUMEL, dtype=torch.int8, device=device), Kind.GRADIENTS)
        self.scales_b = announce(torch.zeros(num_blocks, 1, device=device), Kind.GRADIENTS)  # 0 times any code is 0

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        if values.numel() == self.numel:
            add_in_int8(self.codes_bk, self.scales_b, values, seed)
        else:
            blocks = blocks_of(start, start + values.numel())
            add_in_int8(self.codes_bk[blocks], self.scales_b[blocks], values, seed)

    def read(self, start: int, end: int) -> Tensor:
        blocks = blocks_of(start, end)
        return (self.codes_bk[blocks] * self.scales_b[blocks]).view(-1)[: end - start]

    def add_to(self, gradient: Tensor) -> None:
        codes_bk, scales_b = self.codes_bk, self.scales_b
        if rest := self.numel % BLOCK_NUMEL:  # of the last block
            gradient[-rest:].add_(self.read(self.numel - rest, self.numel))
            gradient, codes_bk, scales_b = gradient[:-rest], codes_bk[:-1], scales_b[:-1]
        gradient.view(-1, BLOCK_NUMEL).addcmul_(codes_bk, scales_b)


def to_int8(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    padded = nn.functional.pad(values.float(), (0, codes_bk.numel() - len(values)))
    exact_bk = codes_bk * scales_b + padded.view(-1, BLOCK_NUMEL)
    scales = exact_bk.abs().amax(1, keepdim=True) / MOST
    scaled_bk = exact_bk / scales.clamp(min=torch.finfo(torch.float32).tiny)
    noise_bk = bits_at_random(codes_bk.numel(), seed, codes_bk.device).view(-1, BLOCK_NUMEL) * 2.0**-24
    scales_b.copy_(scales)
    codes_bk.copy_((scaled_bk + noise_bk).floor().nan_to_num().clamp(-MOST, MOST))


def to_int8_in_pieces(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    values = flat(values)
    for start, end in pieces(len(values)):
        blocks = blocks_of(start, end)
        to_int8(codes_bk[blocks], scales_b[blocks], values[start:end], seed + start)


def blocks_of(start: int, end: int) -> slice:
    """The blocks of the numbers from `start`, where one begins, to `end`."""
    return slice(start // BLOCK_NUMEL, -(-end // BLOCK_NUMEL))


def launch_int8(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    kernels().add_in_int8(codes_bk, scales_b, values, seed)


add_in_int8 = fused(
    "add_in_int8(Tensor(a!) codes_bk, Tensor(b!) scales_b, Tensor values, int seed) -> ()",
    to_int8,
    to_int8_in_pieces,
    launch_int8,
)


@cache
def kernels() -> Any:
    """The module of the kernels, imported when a card first needs them: torch for a CPU comes without Triton."""
    from lowvram.knobs.stepping import sum_kernels

    return sum_kernels


def flat(values: Tensor) -> Tensor:
    """A view of one dimension, in the order in memory: gradients have their parameter's layout, without gaps."""
    return values if values.ndim == 1 else values.as_strided((values.numel(),), (1,))


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """First element and end of each run of elements that is in fp32 at a time: whole blocks, but for the last."""
    for start in range(0, numel, PIECE_NUMEL):
        yield start, min(start + PIECE_NUMEL, numel)
