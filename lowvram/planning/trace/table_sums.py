"""The memory that the gradient of a table, such as an embedding's, takes on a card while it is made.

A table's rows are added in the order of their sorted places: up to 10 by each thread, then what these have
(Embedding.cu; embedding_backward_cuda_kernel in EmbeddingBackwardKernel.cu). If a table is so small that this would
take few threads, they add into the result itself.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from lowvram.core.device import Card
from lowvram.planning.memory.segments import rounded_up
from lowvram.planning.trace.reductions import FP32_BYTES, INDEX_BYTES, WARP

SHORT_LIST = 3072  # places up to which they aren't sorted, and nothing else is allocated
SORT_KEYS = 2**8  # so many keys are sorted in one pass, without copies
SORT_BYTES = 8 * 1024  # that cub's sort takes beside copies of what it sorts
ROWS_OF_THREAD = 10  # NROWS_PER_THREAD
BLOCK_THREADS, MOST_ADDING_BLOCKS = 1024, 16  # MAX_BLOCK_SIZE, MAX_ATOMIC_ACCUM_BLOCKS_PER_SM


class Pair(IntEnum):
    """Two allocations, one after the other."""

    PLACES = 0  # sorted, and their numbers in that order
    SORTING = 1  # the numbers before, and what the sort takes
    NUMBERS = 2  # one allocation: of each place the row that it has among those that occur
    SEGMENTS = 3  # where the places of each row begin, and how many parts they have
    PARTS = 4  # where the places of each part begin; and of which row it is, if threads add into the result
    SUMS = 5  # the result in fp32, if it is to be rounded and threads add into it; else the sums of the parts


class TableSum(NamedTuple):
    """A pair of allocations of such a gradient."""

    num_places: int
    num_rows: int
    width: int
    pair: Pair
    is_rounded: bool  # the gradient has 16 bits


def table_buffers(card: Card, table_sum: TableSum) -> tuple[int, int]:
    """The bytes of a pair; 0 for one that isn't made."""
    num_places, num_rows, width, pair, is_rounded = table_sum
    if num_places <= SHORT_LIST:
        return 0, 0
    segments = min(num_places, num_rows)
    parts = num_places // ROWS_OF_THREAD + segments
    padded = rounded_up(width, WARP)
    blocks = -(-segments * padded // min(padded, BLOCK_THREADS))
    adds = blocks < (card.num_multiprocessors or 0) * MOST_ADDING_BLOCKS and parts > 4 * blocks
    places_bytes = num_places * INDEX_BYTES
    copies_bytes = 2 * places_bytes if num_rows > SORT_KEYS else 0
    whole_bytes = num_rows * width * FP32_BYTES if adds and is_rounded else 0
    pairs = {
        Pair.PLACES: (places_bytes, places_bytes),
        Pair.SORTING: (places_bytes, copies_bytes + SORT_BYTES),
        Pair.NUMBERS: (places_bytes, 0),
        Pair.SEGMENTS: (segments * INDEX_BYTES, segments * INDEX_BYTES),
        Pair.PARTS: (parts * INDEX_BYTES, parts * INDEX_BYTES if adds else 0),
        Pair.SUMS: (whole_bytes, 0 if adds else parts * width * FP32_BYTES),
    }
    return pairs[Pair(pair)]
