"""What an operator allocates while it runs on a card, beside its results and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from lowvram.core.device import Card
from lowvram.planning.trace.reductions import Reduction

FP32_BYTES = 4


class Result(Enum):
    """The place of one of the operator's own results in a group."""

    FIRST = 0  # of those that have no place yet
    LAST = -1


RESULT = Result.FIRST


class Kept(NamedTuple):
    """An allocation in a group that is freed with the group around it."""

    num_bytes: int


# Bytes. A group is allocated in its order and freed, but for results, in the opposite one; a group inside it is freed
# before the next item is allocated. Results come before all groups where none is named.
Group = Sequence["int | Reduction | Kept | Result | Group"]
Rule = Callable[[Card, Sequence[Any], Mapping[str, Any]], Sequence[Group]]


def names_result(group: Group) -> bool:
    return any(isinstance(item, Result) or (type(item) is list and names_result(item)) for item in group)


def argument(args: Sequence[Any], named: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
