"""Kernels of Triton that write and read codes on a card, as the formulas in codes.py do, to the bit.

Each is one kernel. torch.compile would make three of the formula that writes, with a copy of all numbers in fp32
between them: as much as the activation itself takes, or twice.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lowvram.compat.triton import Launcher
from lowvram.core.kernels import LANES, bits_at_random, unit_of

HAIR = 2.0**-20  # as in codes.py


@triton.jit(do_not_specialize=["num_units", "num_blocks", "seed"])
def write_kernel(
    values,
    codes,
    bounds,
    num_units,
    num_blocks,
    seed,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there = places < num_units.to(tl.int64) * UNIT
    exact = tl.load(values + places, mask=is_there, other=0.0).to(tl.float32)
    has_nan = tl.max((exact != exact).to(tl.int32), 1) > 0
    low = tl.where(has_nan, float("nan"), tl.min(exact, 1))
    high = tl.where(has_nan, float("nan"), tl.max(exact, 1))
    low_bits = low.to(tl.int32, bitcast=True)
    low = ((low_bits + ((low_bits >> 31) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
    has_zero = low == 0.0
    num_steps = (2**BITS - 1) - has_zero.to(tl.int32)
    step = tl.div_rn(high - low, num_steps.to(tl.float32))
    step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    divisor = tl.where(step < 1.1754943508222875e-38, 1.1754943508222875e-38, step)
    scaled = tl.div_rn(exact - low[:, None], tl.broadcast_to(divisor[:, None], (ROWS, BLOCK)))
    steps = tl.floor(scaled + bits_at_random(places, seed).to(tl.float32) * 0.000000059604644775390625)
    steps = tl.where(steps == steps, tl.minimum(steps, num_steps.to(tl.float32)[:, None]), 0.0)
    code = steps.to(tl.int32) + (has_zero[:, None] & (exact > 0.0)).to(tl.int32)
    PARTS: tl.constexpr = 8 // BITS  # each byte has a code of each part of a block
    shifts = tl.arange(0, PARTS) * BITS
    packed = tl.sum(tl.reshape(code, (ROWS, PARTS, BLOCK // PARTS)) << shifts[None, :, None], 1)
    is_row = rows < num_blocks
    of_codes = rows[:, None] * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)[None, :]
    tl.store(codes + of_codes, packed.to(tl.uint8), mask=is_row[:, None])
    tl.store(bounds + 2 * rows, low.to(tl.bfloat16), mask=is_row)
    tl.store(bounds + 2 * rows + 1, step.to(tl.bfloat16), mask=is_row)


@triton.jit(do_not_specialize=["num_units"])
def read_kernel(
    values,
    codes,
    bounds,
    num_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    TINY: tl.constexpr,
    NEARLY_ONE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    places = rows[:, None] * BLOCK + columns[None, :]
    num_values = num_units.to(tl.int64) * UNIT
    is_there = places < num_values
    is_row = rows * BLOCK < num_values
    BYTES: tl.constexpr = BLOCK * BITS // 8
    byte = tl.load(codes + rows[:, None] * BYTES + (columns % BYTES)[None, :], mask=is_there, other=0).to(tl.int32)
    code = ((byte >> ((columns // BYTES) * BITS)[None, :]) & (2**BITS - 1)).to(tl.float32)
    low = tl.load(bounds + 2 * rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    step = tl.load(bounds + 2 * rows + 1, mask=is_row, other=0.0).to(tl.float32)[:, None]
    above_zero = (code - NEARLY_ONE) * step
    above_zero = tl.where(above_zero < TINY, TINY, above_zero)
    exact = tl.where((low == 0.0) & (code > 0.0), above_zero, low + code * step)
    if values.dtype.element_ty == tl.bfloat16:  # to the nearest, which Triton's interpreter doesn't round to
        bits = exact.to(tl.int32, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(is_finite, bits + 0x7FFF + ((bits >> 16) & 1), bits) & -0x10000
        exact = bits.to(tl.float32, bitcast=True)
    tl.store(values + places, exact.to(values.dtype.element_ty), mask=is_there)


to_write, to_read = Launcher(write_kernel), Launcher(read_kernel)


def write(codes_bc: Tensor, bounds_b2: Tensor, values: Tensor, bits: int, seed: int) -> None:
    num_blocks, block = len(codes_bc), codes_bc.shape[1] * 8 // bits
    unit, rows = unit_of(values.numel()), LANES // block
    args = (codes_bc, bounds_b2, values.numel() // unit, num_blocks, seed)
    to_write(-(-num_blocks // rows), values, args, (unit, block, rows, bits))


def read(values: Tensor, codes_bc: Tensor, bounds_b2: Tensor, bits: int) -> None:
    num_blocks, block = len(codes_bc), codes_bc.shape[1] * 8 // bits
    unit, rows = unit_of(values.numel()), LANES // block
    constants = (unit, block, rows, bits, torch.finfo(values.dtype).tiny, 1 - HAIR)
    to_read(-(-num_blocks // rows), values, (codes_bc, bounds_b2, values.numel() // unit), constants)
