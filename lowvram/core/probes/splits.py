"""How a model's linear layers can be split over ranks that compute the same samples: those who wrote it say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from lowvram.core.structure import Stated


class How(Enum):
    """What a rank has of a layer that is split. The names are what a user types."""

    columns = "some of the features that it makes, from all that it reads"
    rows = "some of the features that it reads; what the ranks make of them is added up"
    summed = "all of it, but it sees some of the features: the gradients of the ranks are added up"


@final
@dataclass(frozen=True)
class Split:
    """How a layer is split.

    Args:
        packed: the numbers of features that several layers make side by side in this one, such as those of queries,
            keys and values, each of which is split; empty: it is one.
    """

    how: How
    packed: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Splits:
    """What is split of a model.

    Args:
        layers: by their dotted names. Between a layer of columns and the layer of rows that reads it, ranks compute
            each with its own features; elsewhere all compute the same.
        units: numbers that must be multiples of the number of ranks, by what messages call them.
        counts: attributes of modules, (dotted name, attribute), that count what a rank has: integers or tuples of such.
    """

    layers: Mapping[str, Split]
    units: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[tuple[str, str], ...] = ()


SPLITS = Stated[Splits | None]("Which layers can be split over ranks, and how?", None)
