"""The memory that the gradients of a norm's weight and bias take on a card while they are made (layer_norm_kernel.cu,
LaunchGammaBetaBackwardCUDAKernel): with many rows, blocks of 32 of them are summed first."""

from __future__ import annotations

from typing import NamedTuple

from lowvram.core.device import Card
from lowvram.planning.trace.reductions import FP32_BYTES, WARP, Reduction, buffers_of, columns_of

MOST_ROWS = 64 * 1024  # that are summed at once


class NormSum(NamedTuple):
    """A pair of allocations for these gradients: the sums of the blocks, or what the last sum takes."""

    num_rows: int
    num_columns: int
    element_bytes: int
    is_last: bool
    has_bias: bool


def norm_buffers(card: Card, norm_sum: NormSum) -> tuple[int, int]:
    """The bytes of a pair; 0 for one that isn't made."""
    num_rows, num_columns, element_bytes, is_last, has_bias = norm_sum
    if num_rows <= MOST_ROWS:
        return 0, 0
    sums = -(-num_rows // WARP)
    if is_last:
        return buffers_of(card, Reduction(sums, num_columns, 0, FP32_BYTES, False, False, columns_of([num_columns])))
    num_bytes = sums * num_columns * element_bytes
    return num_bytes, num_bytes if has_bias else 0
