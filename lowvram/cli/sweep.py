"""The points of a sweep: grids and lists of them, named by what differs between them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lowvram.config.errors import BadInput
from lowvram.config.identity import point_name

Batch = Sequence[Sequence[str]]  # of points, each with its overrides

_names: dict[frozenset[str], str] = {}  # of points that a list names, by their words


def with_points(batch: Batch, points: Any) -> Batch:
    """Each point of a grid together with each of a list. A word that is typed, or swept, holds for all of the list, and
    what is the same then as an earlier point is left out.

    Args:
        points: their words by their names; None: there is no list.

    Raises:
        BadInput: it is anything else.
    """
    if points is None:
        return batch
    if not (isinstance(points, Mapping) and points and all(isinstance(words, str) for words in points.values())):
        allowed = "names, each with the words of a point, such as {small: accum=x4 ckpt=every1}"
        raise BadInput("hydra.sweeper.points", points, allowed)
    swept = swept_keys(batch)
    found: dict[frozenset[str], Sequence[str]] = {}
    for typed in batch:
        fixed = {key_of(word) for word in typed}
        for name, text in points.items():
            words = [*typed, *(word for word in shlex.split(text) if key_of(word) not in fixed)]
            if frozenset(words) not in found:
                found[frozenset(words)] = words
                _names[frozenset(words)] = "-".join(filter(None, [str(name), point_name(list(typed), swept)]))
    return list(found.values())


def name_of(words: Sequence[str], swept: list[str]) -> str:
    """Of a point: that of the list which it is from, or what was swept."""
    return _names.get(frozenset(words)) or point_name(list(words), swept)


def key_of(word: str) -> str:
    return word.partition("=")[0]


def swept_keys(batch: Batch) -> list[str]:
    """The keys whose values differ between points, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for overrides in batch:
        for override in overrides:
            key, _, value = override.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1]
