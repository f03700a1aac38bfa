"""The points of a sweep: grids and lists of them, named by what differs between them, and composed one by one.
Imports no torch.

Hydra takes about 0.1 s to compose a point, so a sweep isn't composed as a whole: a wrong option is reported before the
first point, one wrong value among many when its point's turn comes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product, takewhile
from typing import Any, NamedTuple, final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from lowvram.config.errors import BadInput, require
from lowvram.config.identity import point_name
from lowvram.config.run_names import run_name
from lowvram.config.words import key as key_of

Batch = Sequence[Sequence[str]]  # of points, each with its overrides
POINT = "point:"  # and the name of a point before: in a list of points, the folder of that point
ListNames = Mapping[frozenset[str], str]  # of points that come from a list, by their words


class Names(NamedTuple):
    """What a point is called; a composed point has them in its hydra.sweeper."""

    point: str  # in tables: what was swept
    run: str  # at the loggers: what it changes against the defaults
    axes: list[str]  # what the sweep varies


def grid(typed: Sequence[Override], max_batch_size: int | None) -> list[Batch]:
    """The points that `a=1,2 b=3,4` lists, in the order of Hydra's own sweeper, in batches of `max_batch_size`. The
    last word for a key wins.

    Raises:
        BadInput: a key is swept in a way that lists no values.
    """
    words: dict[str, list[str]] = {}
    for override in typed:
        key = override.get_key_element()
        if not override.is_sweep_override():
            words[key] = [f"{key}={override.get_value_element_as_str()}"]
        else:
            words[key] = [f"{key}={value}" for value in listed(key, override)]
    points = [list(point) for point in product(*words.values())]
    size = max_batch_size or len(points)
    return [points[first : first + size] for first in range(0, len(points), size)]


def listed(key: str, override: Override) -> list[str]:
    """The values that a word of a sweep lists. Raises BadInput if it lists none."""
    with suppress(ValueError):  # of Python's range
        if override.is_discrete_sweep() and (values := list(override.sweep_string_iterator())):
            return values
    allowed = f"a list of values, such as {key}=1,2, or a range, such as '{key}=range(1,5)'"
    raise BadInput(key, (override.input_line or key).partition("=")[2], allowed)


def with_points(batch: Batch, points: Any) -> tuple[Batch, ListNames]:
    """Combine each point of a grid with each of a list; returns the points, and their names in the list. A typed or
    swept word overrides the list's, and a point that is then the same as an earlier one is left out.

    Args:
        points: their words by their names; None: there is no list. Words may refer to points before (linked_points.py).

    Raises:
        BadInput: `points` is anything else.
    """
    if points is None:
        return batch, {}
    if not (isinstance(points, Mapping) and points and all(isinstance(words, str) for words in points.values())):
        allowed = "names, each with the words of a point, such as {small: accum=x4 ckpt=every1}"
        raise BadInput("hydra.sweeper.points", points, allowed)
    swept = swept_keys(batch)
    combined, names = dict[frozenset[str], Sequence[str]](), dict[frozenset[str], str]()
    for typed in batch:
        fixed, places = {key_of(word) for word in typed}, dict[str, int]()
        for name, text in points.items():
            added = numbered([word for word in words_in(name, text) if key_of(word) not in fixed], places)
            words = [*typed, *added]
            if frozenset(words) not in combined:
                combined[frozenset(words)] = words
                names[frozenset(words)] = "-".join(filter(None, [str(name), point_name(list(typed), swept)]))
            places[str(name)] = list(combined).index(frozenset(words))
    return list(combined.values()), names


def words_in(name: str, text: str) -> list[str]:
    """The words of a point in a list. Raises BadInput for a quotation mark without an end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"hydra.sweeper.points.{name}", text, f"words as a shell reads them: {error}") from None


def numbered(words: Sequence[str], places: Mapping[str, int]) -> list[str]:
    """The words; where one refers to an earlier point by its name, with that point's place in the list instead.

    Raises:
        BadInput: no earlier point has that name.
    """
    numbered: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        name = value.removeprefix(POINT)
        if value.startswith(POINT):
            require(name in places, key, value, f"{POINT} and the name of a point before it in the list")
        numbered.append(f"{key}={POINT}{places[name]}" if value.startswith(POINT) else word)
    return numbered


def names_of(words: Sequence[str], swept: list[str], axes: list[str], names: ListNames) -> Names:
    """The names of a point: the list's name for it, or its values."""
    named = names.get(frozenset(words))
    return Names(named or point_name(list(words), swept), named or run_name(words, swept), axes)


def axes_of(batch: Batch) -> list[str]:
    """The keys that only some points have, or whose values differ."""
    keys = dict.fromkeys(key_of(word) for words in batch for word in words)
    return [
        key for key in keys if len({frozenset(word for word in words if key_of(word) == key) for words in batch}) > 1
    ]


def swept_keys(batch: Batch) -> list[str]:
    """The keys whose values differ between points, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for overrides in batch:
        for override in overrides:
            key, _, value = override.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, distinct in values.items() if len(distinct) > 1]


@final
class UntilOver(Sequence[Sequence[str]]):
    """A batch that ends once `is_over` says so: launchers iterate over it, so the sweep ends between two points."""

    def __init__(self, batch: Batch, is_over: Callable[[], bool]) -> None:
        self._batch, self._is_over = batch, is_over

    def __iter__(self) -> Iterator[Sequence[str]]:
        return takewhile(lambda _: not self._is_over(), self._batch)

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, place: Any) -> Any:
        return self._batch[place]


NUM_CHECKED = 16  # before the first point; more of them would take seconds
Compose = Callable[[Sequence[str]], DictConfig]


def representative(batch: Batch, num: int = NUM_CHECKED) -> list[int]:
    """The indices of up to `num` points that together hold as many distinct words as possible: greedily, the point with
    the most new words first."""
    if len(batch) <= num:
        return list(range(len(batch)))
    left = {place: set(words) for place, words in enumerate(batch)}
    places: list[int] = []
    while left and len(places) < num:
        place = max(left, key=lambda place: len(left[place]))
        covered = left.pop(place)
        places.append(place)
        left = {place: words - covered for place, words in left.items() if words - covered}
    return sorted(places)


def numbered_as(index: int, config: DictConfig) -> DictConfig:
    """The configuration, as that of the point with this index in the sweep."""
    with open_dict(config.hydra.job):
        config.hydra.job.num = config.hydra.job.id = index
    return config


@final
class SweepBatch:
    """The points of a sweep, or of one batch of it, composed on demand.

    Args:
        batch: the words of each.
        first: the index of the first of them in the sweep.
        compose: composes a configuration from words.
        swept: the keys that differ between the points; None: as the batch shows.
        checked: the words of points that are checked before; None: representative ones of the batch.
        names: of points that come from a list.
    """

    def __init__(
        self,
        batch: Batch,
        first: int,
        compose: Compose,
        swept: list[str] | None = None,
        checked: Batch | None = None,
        names: ListNames | None = None,
    ) -> None:
        self._names = names or {}
        self.batch, self.first, self._compose, self._checked = batch, first, compose, checked
        self.swept = swept_keys(batch) if swept is None else swept
        self.axes = axes_of(batch) if swept is None else swept

    def to_check(self) -> Iterator[DictConfig]:
        """The configurations of the points that are checked before any runs. Raises Hydra's error if one can't be
        composed."""
        if self._checked is None:
            yield from map(self.composed, representative(self.batch))
        else:
            yield from (numbered_as(self.first, self._compose(words)) for words in self._checked)

    def composed(self, place: int) -> DictConfig:
        return numbered_as(self.first + place, self._compose(self.batch[place]))

    def next(self, index: int, num: int) -> Iterator[tuple[int, DictConfig]]:
        """Up to `num` points from `index` on, each with its index. Raises Hydra's error if one can't be composed."""
        for place in range(index - self.first, min(index - self.first + num, len(self.batch))):
            yield self.first + place, self.composed(place)

    def names(self, words: Sequence[str]) -> Names:
        """What the point with these words is called."""
        return names_of(words, self.swept, self.axes, self._names)

    def name(self, index: int) -> str:
        return self.names(self.batch[index - self.first]).point
