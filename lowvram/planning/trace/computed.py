"""Temporary memory whose bytes don't grow evenly with the batch size, but follow from numbers that do. A trace keeps
these numbers, so that the bytes can be computed for other batch sizes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lowvram.core.device import Card
from lowvram.planning.trace.norm_sums import NormSum, norm_buffers
from lowvram.planning.trace.reductions import Reduction, buffers_of
from lowvram.planning.trace.table_sums import TableSum, table_buffers

Computed = Reduction | TableSum | NormSum  # each of two allocations, one after the other
KINDS: Final = (Reduction, TableSum, NormSum)
BUFFERS: Final = {Reduction: buffers_of, TableSum: table_buffers, NormSum: norm_buffers}
# Columns of `Trace.computed`: the birth of the first of the two, the kind, then the numbers of the kind and zeros. Only
# the first of the numbers, which are sizes, may grow with the batch.
FIRST_SIZE, NUM_SIZES = 2, 3
NUM_COLUMNS = FIRST_SIZE + max(len(kind._fields) for kind in KINDS)
FIXED_COLUMNS = [*range(FIRST_SIZE), *range(FIRST_SIZE + NUM_SIZES, NUM_COLUMNS)]


def row_of(birth: int, item: Computed) -> tuple[int, ...]:
    """A row of `Trace.computed`."""
    row = (birth, KINDS.index(type(item)), *map(int, item))
    return (*row, *[0] * (NUM_COLUMNS - len(row)))


def pair_of(card: Card, item: Computed) -> tuple[int, int]:
    """The bytes of the two allocations."""
    return BUFFERS[type(item)](card, item)


def sizes_of(card: Card, rows: Tensor) -> Tensor:
    """The bytes of both allocations of each row of `Trace.computed`: (rows, 2) int64."""
    items, which = rows[:, 1:].unique(dim=0, return_inverse=True)
    sizes = [pair_of(card, KINDS[kind](*numbers[: len(KINDS[kind]._fields)])) for kind, *numbers in items.tolist()]
    return torch.tensor(sizes, dtype=torch.int64).view(-1, 2)[which]
