"""Points of a sweep that go on from earlier ones: in a list of points, `model.init=point:NAME` stands for the folder of
the point that is called NAME. Imports no torch.

A batch of points is run in rounds: first those that refer to no other, then those whose points have ended, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from lowvram.cli.call import Call
from lowvram.cli.initial import with_initial, with_transformed, word_for
from lowvram.cli.sweep import POINT, Batch, Compose, ListNames, SweepBatch, axes_of, names_of
from lowvram.config.transforms import TRANSFORMS
from lowvram.config.words import key
from lowvram.results.row import Status
from lowvram.results.terminal import tell


def references(words: Sequence[str]) -> dict[str, int]:
    """The places in the batch of the points that a point goes on from, by the keys that name them."""
    values = (word.partition("=")[::2] for word in words)
    return {key: int(value.removeprefix(POINT)) for key, value in values if value.startswith(POINT)}


def rounds(batch: Batch) -> list[list[int]]:
    """The places of the points of each round. A point refers to points before it alone."""
    turns: list[int] = []
    for words in batch:
        turns.append(max((turns[place] + 1 for place in references(words).values()), default=0))
    return [[place for place, turn in enumerate(turns) if turn == number] for number in range(max(turns) + 1)]


def linked(words: Sequence[str], folders: Mapping[int, Path]) -> list[str]:
    """The words of a point with the folders that it goes on from. Where it goes on from a model, the model's fields are
    those in that folder, whatever was typed for all points.

    Raises:
        BadInput: a folder holds no trained model.
    """
    before = references(words)
    is_given = before.keys() & {"model.init", *(f"{mode}.run" for mode in TRANSFORMS)}
    others = [word for word in words if key(word) not in before and not (is_given and key(word).startswith("model."))]
    return with_initial(
        with_transformed([*others, *(word_for(name, str(folders[place])) for name, place in before.items())])
    )


@final
class Rounds:
    """The points of a batch, which are launched round by round.

    Args:
        batch: the words of each, as `with_points` returns them.
        names: of points that come from a list, by their words.
        first: the index of the first of them in the sweep.
        call: knows how points have ended.
    """

    def __init__(self, batch: Batch, names: ListNames, first: int, compose: Compose, call: Call) -> None:
        self._batch, self._compose, self._first, self._call = batch, compose, first, call
        self._names = dict(names)
        self._named = {place for words in batch for place in references(words).values()}  # by points that go on
        self._indices: dict[int, int] = {}  # in the sweep, of the points that were launched, by their places
        self._folders: dict[int, Path] = {}  # of those that are named

    def launch(self, launch: Callable[[SweepBatch], None]) -> int:
        """Run all points, unless the sweep is to end. Returns how many."""
        in_order, axes = rounds(self._batch), axes_of(self._batch)
        for places in in_order:
            coming = [place for place in places if self._can_begin(place)]
            if coming and not self._call.is_over():
                words = [self._words(place) for place in coming]
                index = self._first + len(self._indices)
                swept = axes if len(in_order) > 1 else None
                points = SweepBatch(words, index, self._compose, swept, names=self._names)
                self._indices |= {place: index + nth for nth, place in enumerate(coming)}
                launch(points)
                self._folders |= {
                    place: self._call.endings[self._indices[place]].folder
                    for place in self._named.intersection(coming)
                    if self._indices[place] in self._call.endings
                }
        return len(self._indices)

    def _can_begin(self, place: int) -> bool:
        """Whether the points have ended well that a point goes on from; if not, a line says which didn't."""
        for name, before in references(self._batch[place]).items():
            row = self._call.row(self._indices[before]) if before in self._indices else None
            if row is None or row["status"] != Status.OK:
                missing = f"{name} is the folder of {self._name(before)}, which has no model"
                tell(f"{self._name(place)}: left out, as {missing}")
                return False
        return True

    def _words(self, place: int) -> Sequence[str]:
        words = self._batch[place]
        if not references(words):
            return words
        found = linked(words, self._folders)
        if (name := self._names.get(frozenset(words))) is not None:
            self._names[frozenset(found)] = name
        return found

    def _name(self, place: int) -> str:
        return names_of(self._batch[place], [], [], self._names).point
