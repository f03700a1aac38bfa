"""The memory that a reduction, such as a sum, takes on a card while it runs: partial results of its thread blocks.

torch splits a long reduction over several thread blocks, which exchange partial results through a buffer from the
caching allocator. For sums over rows, such as a bias's gradient, that buffer may be larger than the input: in torch
2.13 its size counts each thread's columns twice. This file follows aten/src/ATen/native/cuda/Reduce.cuh
(setReduceConfig and global_memory_size), a header that comes with torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor

from lowvram.core.device import Card

MOST_THREADS = 512  # of a thread block, mnt_wrapper
WARP = 32
FP32_BYTES, INDEX_BYTES = 4, 8
FEWEST_VALUES, MOST_VALUES = 16, 256  # that a thread sums, min_values_per_thread and max_values_per_thread
FEWEST_VECTORISED = 128  # inputs from which on threads load several at a time
VECTOR = 4  # of such a load
MOST_BYTES = 2**31  # of an input; larger ones are split, as their offsets don't fit 32 bits
# The most resident threads of a multiprocessor, by compute capability ("Technical Specifications per Compute
# Capability" of the CUDA programming guide).
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
MOST_COMMON_THREADS = 2048


class Reduction(NamedTuple):
    """A reduction, as its kernel is launched for it. A tuple of integers, so that a trace can keep it in a tensor."""

    num_inputs: int  # for each output
    num_outputs: int
    input_bytes: int
    element_bytes: int  # of a partial result
    is_inner: bool  # whether it reduces the dimension with the smallest stride
    is_vectorised: bool  # whether threads load neighbouring inputs at a time, where there are enough
    num_columns: int  # outputs of a thread


def reduction_of(tensor: Tensor, dims: Iterable[int] | None, element_bytes: int) -> Reduction:
    """The reduction of a tensor over some dimensions; None: over all. `element_bytes` are those of a partial result."""
    shape, strides = tensor.shape, tensor.stride()
    reduced = {dim % max(1, len(shape)) for dim in dims} if dims else set(range(len(shape)))
    inner = joined([(strides[dim], shape[dim]) for dim in reduced if shape[dim] > 1])
    outer = joined([(strides[dim], shape[dim]) for dim in range(len(shape)) if dim not in reduced and shape[dim] > 1])
    num_inputs, num_outputs = (product(size for _, size in each) for each in (inner, outer))
    is_inner = not outer or (bool(inner) and inner[0][0] < outer[0][0])
    fastest = (inner if is_inner else outer)[:1]
    is_dense = not fastest or fastest[0][0] == 1
    others = [stride for stride, _ in [*inner, *outer[1:]]]
    num_columns = columns_of([outer[0][1], *others]) if is_dense and not is_inner else 1
    is_vectorised = is_dense and is_inner and len(inner) == 1
    num_bytes = num_inputs * num_outputs * tensor.dtype.itemsize
    return Reduction(num_inputs, num_outputs, num_bytes, element_bytes, is_inner, is_vectorised, num_columns)


def joined(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dimensions as (stride, size), the smallest stride first. Dimensions that are contiguous with each other are
    merged."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


def product(sizes: Iterable[int]) -> int:
    number = 1
    for size in sizes:
        number *= size
    return number


def columns_of(numbers: Iterable[int]) -> int:
    """The largest of 4, 2 and 1 that divides all numbers (get_output_vec_size)."""
    columns = VECTOR
    for number in numbers:
        while number % columns:
            columns //= 2
    return columns


@cache
def buffers_of(card: Card, reduction: Reduction) -> tuple[int, int]:
    """The bytes of a reduction's two buffers, for partial results and for counters: (0, 0) if it isn't split over
    thread blocks, or if the card's number of multiprocessors isn't known."""
    if card.num_multiprocessors is None or not reduction.num_inputs * reduction.num_outputs:
        return 0, 0
    while reduction.input_bytes > MOST_BYTES:  # two halves, one after the other
        halved, half_bytes = -(-reduction.num_inputs // 2), -(-reduction.input_bytes // 2)
        reduction = reduction._replace(num_inputs=halved, input_bytes=half_bytes)
    num_inputs, num_outputs, _, element_bytes, is_inner, is_vectorised, num_columns = reduction
    across, along = (num_inputs, num_outputs) if is_inner else (num_outputs // num_columns, num_inputs)
    if is_vectorised and across >= FEWEST_VECTORISED:
        across //= VECTOR
    width, height = block_of(across, along, MOST_THREADS // num_columns)
    step_input, step_output = (width, 1) if is_inner else (1, width)
    is_split = -(-num_inputs // step_input) >= min(height * FEWEST_VALUES, MOST_VALUES)
    if is_split:
        step_input *= height
    else:
        step_output *= height
    grid = -(-(num_outputs // num_columns) // step_output)
    most_blocks = card.num_multiprocessors * (THREADS.get(card.capability, MOST_COMMON_THREADS) // (width * height))
    num_values = -(-num_inputs // step_input)  # that a thread reduces
    if not is_split or num_values < MOST_VALUES or grid > most_blocks:
        return 0, 0
    wanted = min(-(-most_blocks // grid), -(-num_values // FEWEST_VALUES))
    num_blocks = max(wanted, -(-num_values // MOST_VALUES))
    if num_blocks == 1:
        return 0, 0
    num_bytes = element_bytes * num_outputs * num_blocks * (1 if is_inner else width * num_columns)
    return num_bytes, 4 * grid


def block_of(across: int, along: int, most: int) -> tuple[int, int]:
    """The width and height of a thread block (set_block_dimension)."""
    across, along = (most if size >= most else power_of_two(size) for size in (across, along))
    height = min(along, most // min(across, WARP))
    return min(across, most // height), height


def power_of_two(number: int) -> int:
    """The largest power of two up to `number`, at least 1 (last_pow2)."""
    return 1 << max(0, number.bit_length() - 1)
