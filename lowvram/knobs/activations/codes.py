"""Numbers in 8, 4 or 2 bits: codes between two bounds per block of 64, rounded at random.

A number lies between two levels and becomes one of them, so that on average nothing is lost. Where ReLU has left a
zero, the smallest number of the block is zero. There one code is for zeros alone, and positive numbers that round to
zero are read as tiny ones: ReLU's gradient, which depends only on which numbers are positive, is exact.

Shapes: b blocks, k = 64 numbers of a block, c bytes of codes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.core.fused import fused
from lowvram.core.rounding import MOST_SEEDS, bits_at_random

BLOCK_NUMEL = 64
PIECE_NUMEL = 2**17  # that are in fp32 at a time, in several tensors of 0.5 MiB
LOW_BITS = 2**16 - 1  # those bits of an fp32 number that bf16 drops
HAIR = 2.0**-20  # of a step: what a positive number is read as that has rounded to zero


def empty_codes(numel: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for `numel` numbers: codes (b, c) and bounds (b, 2), which are the smallest level and the step to the next.
    For 64 numbers 8 * bits + 4 bytes."""
    num_blocks = -(-numel // BLOCK_NUMEL)
    codes_bc = torch.empty(num_blocks, BLOCK_NUMEL * bits // 8, dtype=torch.uint8, device=device)
    return codes_bc, torch.empty(num_blocks, 2, dtype=torch.bfloat16, device=device)


def to_codes(codes_bc: Tensor, bounds_b2: Tensor, values: Tensor, bits: int, seed: int) -> None:
    num_blocks, num_bytes = codes_bc.shape
    padded = nn.functional.pad(values.float(), (0, num_blocks * BLOCK_NUMEL - len(values)))
    exact_bk = padded.view(num_blocks, BLOCK_NUMEL)
    low = down(exact_bk.amin(1, keepdim=True))
    has_zero = low == 0
    num_steps = (2**bits - 1) - has_zero.int()
    step = up((exact_bk.amax(1, keepdim=True) - low) / num_steps)
    scaled_bk = (exact_bk - low) / step.clamp(min=torch.finfo(torch.float32).tiny)
    noise_bk = bits_at_random(exact_bk.numel(), seed, exact_bk.device).view(num_blocks, BLOCK_NUMEL) * 2.0**-24
    steps_bk = torch.minimum((scaled_bk + noise_bk).floor().nan_to_num(), num_steps)
    codes_bk = (steps_bk + (has_zero & (exact_bk > 0))).to(torch.uint8)
    bounds_b2.copy_(torch.cat([low, step], 1))
    parts = codes_bk.view(num_blocks, 8 // bits, num_bytes).unbind(1)  # each byte has a code of each part
    codes_bc.copy_(parts[0])
    for index, part in enumerate(parts[1:], 1):
        codes_bc |= part << (index * bits)


def down(exact: Tensor) -> Tensor:
    """fp32 numbers, rounded down to the next one that bf16 holds."""
    bits = exact.view(torch.int32)
    return without_low_bits(bits + ((bits >> 31) & LOW_BITS))  # of a negative number away from zero


def up(exact: Tensor) -> Tensor:
    """Positive fp32 numbers, rounded up to the next one that bf16 holds."""
    return without_low_bits(exact.view(torch.int32) + LOW_BITS)


def without_low_bits(bits: Tensor) -> Tensor:
    return (bits & ~LOW_BITS).view(torch.float32)


def from_codes(values: Tensor, codes_bc: Tensor, bounds_b2: Tensor, bits: int) -> None:
    parts = [(codes_bc >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    codes_bk, (low, step) = torch.cat(parts, 1), bounds_b2.float().split(1, 1)
    above_zero_bk = ((codes_bk - (1 - HAIR)) * step).clamp(min=torch.finfo(values.dtype).tiny)
    exact_bk = torch.where((low == 0) & (codes_bk > 0), above_zero_bk, low + codes_bk * step)
    values.copy_(exact_bk.view(-1)[: len(values)])


def pieces(numel: int) -> Iterator[tuple[slice, slice]]:
    """The numbers that are in fp32 at a time, and their blocks."""
    for start in range(0, numel, PIECE_NUMEL):
        end = min(start + PIECE_NUMEL, numel)
        yield slice(start, end), slice(start // BLOCK_NUMEL, -(-end // BLOCK_NUMEL))


def to_codes_in_pieces(codes_bc: Tensor, bounds_b2: Tensor, values: Tensor, bits: int, seed: int) -> None:
    for piece, blocks in pieces(len(values)):
        to_codes(codes_bc[blocks], bounds_b2[blocks], values[piece], bits, (seed + piece.start) % MOST_SEEDS)


def from_codes_in_pieces(values: Tensor, codes_bc: Tensor, bounds_b2: Tensor, bits: int) -> None:
    for piece, blocks in pieces(len(values)):
        from_codes(values[piece], codes_bc[blocks], bounds_b2[blocks], bits)


@cache
def kernels() -> Any:
    """The module of the kernels, imported when a card first needs them: torch for a CPU comes without Triton."""
    from lowvram.knobs.activations import code_kernels

    return code_kernels


# Both write into their first arguments; `values` (numel,) is floating-point.
write_codes = fused(
    "write_codes(Tensor(a!) codes_bc, Tensor(b!) bounds_b2, Tensor values, int bits, int seed) -> ()",
    to_codes,
    to_codes_in_pieces,
    lambda *args: kernels().write(*args),
)
read_codes = fused(
    "read_codes(Tensor(a!) values, Tensor codes_bc, Tensor bounds_b2, int bits) -> ()",
    from_codes,
    from_codes_in_pieces,
    lambda *args: kernels().read(*args),
)
