"""What an operator allocates while it runs on a card, beside its results and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from lowvram.core.device import Card
from lowvram.planning.trace.computed import Computed


class Result(Enum):
    """The place of one of the operator's own results."""

    FIRST = 0  # of those that have no place yet
    LAST = -1


RESULT = Result.FIRST


class Kept(NamedTuple):
    """An allocation that is freed with the sequence around its own."""

    num_bytes: int


# Bytes, allocated in this order and freed, but for results, in the opposite one. Those of an inner sequence are freed
# before the next item is allocated. Where no result is named, the results come first.
Allocations = Sequence["int | Computed | Kept | Result | Allocations"]
Rule = Callable[[Card, Sequence[Any], Mapping[str, Any]], Allocations]


def names_result(allocations: Allocations) -> bool:
    return any(isinstance(item, Result) or (type(item) is list and names_result(item)) for item in allocations)


def argument(args: Sequence[Any], named: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else named.get(name, default)
