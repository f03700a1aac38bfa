"""The widths inside blocks, which structured pruning makes smaller: no other block sees them, so each block can drop
units of its own. A unit is a feature of an MLP, a channel, or a head of keys and values with its heads of queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class InnerWidth:
    """One width of one block: some tensors write its units, one layer reads them.

    Attributes:
        writers: names of the tensors that have the units along dimension 0: weights, biases, what norms hold.
        reader: name of the linear layer or convolution that has them along dimension 1 of its weight.
        rows: (num_units, rows of each), int64: where each unit is in dimension 0 of the writers.
        columns: (num_units, columns of each), int64: where it is in dimension 1 of the reader's weight.
    """

    writers: tuple[str, ...]
    reader: str
    rows: Tensor
    columns: Tensor

    @property
    def num_units(self) -> int:
        return len(self.rows)

    def slices(self) -> list[tuple[str, int, Tensor]]:
        """The name of each tensor that has the units, along which dimension, and where each unit is in it."""
        return [*((name, 0, self.rows) for name in self.writers), (f"{self.reader}.weight", 1, self.columns)]


def one_each(num_units: int) -> Tensor:
    """The rows, or columns, of units that have one each: (num_units, 1)."""
    return torch.arange(num_units)[:, None]


def num_kept(num_units: int, ratio: float, multiple: int = 1) -> int:
    """How many units stay if a share `ratio` of them leaves: the nearest multiple of `multiple`, of two equally near
    ones the larger, and at least one unless there are fewer units."""
    wanted = math.floor((1 - ratio) * num_units / multiple + 0.5) * multiple
    return min(num_units, max(wanted, multiple))


def sliced(state: Mapping[str, Tensor], widths: Sequence[InnerWidth], kept: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a model, by name, without the units that leave.

    Args:
        kept: of each width the indices of the units that stay, (num_kept,) int64.
    """
    smaller = dict(state)
    for width, units in zip(widths, kept, strict=True):
        for name, dim, places in width.slices():
            index = places[units].flatten().sort().values  # tensors keep the order of what stays
            smaller[name] = smaller[name].index_select(dim, index.to(smaller[name].device))
    return smaller
