"""Kernels of Triton that add gradients to sums in few bits on a card, as the formulas in totals.py do, to the bit.

A step has a call for each matrix and each part, so that what a call takes the host counts
(lowvram.core.kernels.py).
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowvram.compat.triton import Launcher
from lowvram.core.kernels import LANES, bits_at_random, unit_of


@triton.jit(do_not_specialize=["num_units", "seed"])
def bf16_kernel(values, sums, num_units, seed, UNIT: tl.constexpr, NUM: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    is_there = places < num_units.to(tl.int64) * UNIT
    old = tl.load(sums + places, mask=is_there).to(tl.float32)
    exact = old + tl.load(values + places, mask=is_there).to(tl.float32)
    bits = exact.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(is_finite, bits + (bits_at_random(places, seed) & 0xFFFF), bits) & -0x10000
    tl.store(sums + places, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=is_there)


@triton.jit(do_not_specialize=["num_units", "num_blocks", "seed"])
def int8_kernel(
    values, codes, scales, num_units, num_blocks, seed, UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row = rows < num_blocks
    is_block = is_row[:, None]
    is_there = places < num_units.to(tl.int64) * UNIT
    old = tl.load(codes + places, mask=is_block).to(tl.float32) * tl.load(scales + rows, mask=is_row)[:, None]
    exact = old + tl.load(values + places, mask=is_there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(exact), 1)
    largest = tl.where(tl.max((exact != exact).to(tl.int32), 1) > 0, float("nan"), largest)
    scale = tl.div_rn(largest, 127.0)
    scaled = tl.div_rn(exact, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)[:, None])
    code = tl.floor(scaled + bits_at_random(places, seed).to(tl.float32) * 0.000000059604644775390625)
    code = tl.where(code == code, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0)
    tl.store(scales + rows, scale, mask=is_row)
    tl.store(codes + places, code.to(tl.int8), mask=is_block)


add_to_bf16, add_to_int8 = Launcher(bf16_kernel), Launcher(int8_kernel)


def add_in_bf16(sums: Tensor, values: Tensor, seed: int) -> None:
    numel = values.numel()
    unit = unit_of(numel)
    add_to_bf16(-(-numel // LANES), values, (sums, numel // unit, seed), (unit, LANES))


def add_in_int8(codes_bk: Tensor, scales_b: Tensor, values: Tensor, seed: int) -> None:
    num_blocks, block = codes_bk.shape
    numel, rows = values.numel(), LANES // block
    unit = unit_of(numel)
    args = (codes_bk, scales_b, numel // unit, num_blocks, seed)
    add_to_int8(-(-num_blocks // rows), values, args, (unit, block, rows))
