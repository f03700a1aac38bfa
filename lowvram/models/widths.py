"""The widths inside blocks, which structured pruning makes smaller: no other block sees them, so each block can drop
units of its own. A unit is a feature of an MLP, a channel, or a head of keys and values with its heads of queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor


class Slices(NamedTuple):
    """Where the units of a width are in one tensor."""

    name: str  # of the tensor
    dim: int  # the dimension along which they are
    places: Tensor  # (num_units, places of each), int64


@final
@dataclass(frozen=True, eq=False)
class InnerWidth:
    """One width of one block: some tensors write its units, one layer reads them.

    Attributes:
        writers: weights, biases, what norms hold.
        reader: the weight of the linear layer or convolution whose inputs the units are.
    """

    writers: tuple[Slices, ...]
    reader: Slices

    @property
    def num_units(self) -> int:
        return len(self.reader.places)

    @property
    def layer(self) -> str:
        """The name of the layer that reads the units."""
        return self.reader.name.removesuffix(".weight")

    def slices(self) -> list[Slices]:
        """All tensors that have the units."""
        return [*self.writers, self.reader]


def of_layer(name: str) -> tuple[str, str]:
    """The names of a layer's tensors."""
    return f"{name}.weight", f"{name}.bias"


def usual_width(writers: Iterable[str], layer: str, rows: Tensor, columns: Tensor) -> InnerWidth:
    """A width whose units are rows of all writers, and columns of the weight of the layer that reads them.

    Args:
        rows, columns: (num_units, rows or columns of each), int64.
    """
    return InnerWidth(tuple(Slices(name, 0, rows) for name in writers), Slices(f"{layer}.weight", 1, columns))


class Pruned(NamedTuple):
    """How a model becomes smaller.

    Attributes:
        config: the configuration of the smaller model.
        widths: what becomes smaller, of the larger model.
        numbers: of each width how many units stay.
        left: sentences: what stays as it is, and why.
        holds: of each width the units that stay -> whether the smaller model computes what the larger one computes with
            zeros in place of the others; for models of which it isn't known by construction.
    """

    config: Any
    widths: list[InnerWidth]
    numbers: list[int]
    left: list[str]
    holds: Callable[[Sequence[Tensor]], bool] = lambda kept: True

    @property
    def is_smaller(self) -> bool:
        return any(number < width.num_units for number, width in zip(self.numbers, self.widths, strict=True))


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


def mask(state: Mapping[str, Tensor], widths: Sequence[InnerWidth], kept: Sequence[Tensor]) -> None:
    """Write zeros where the units are that leave."""
    for width, units in zip(widths, kept, strict=True):
        leaves = torch.ones(width.num_units, dtype=torch.bool)
        leaves[units] = False
        for name, dim, places in width.slices():
            index = places[leaves].flatten()
            state[name].index_fill_(dim, index.to(state[name].device), 0.0)
