"""The points of a sweep before their turn: few are looked at before the first, whatever their number. Imports no torch.

To compose a point takes Hydra about 0.1 s, so a sweep is not composed as a whole: what is wrong with an option is told
before the first point, what is wrong with one value of many at its point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from omegaconf import DictConfig, open_dict

from lowvram.cli.sweep import Batch, name_of, swept_keys

NUM_CHECKED = 16  # before the first point; more of them would take seconds
Compose = Callable[[Sequence[str]], DictConfig]


def representative(batch: Batch, num: int = NUM_CHECKED) -> list[int]:
    """The places of up to `num` points that hold each distinct word of a sweep, as far as they reach: always the one
    that brings most new words."""
    if len(batch) <= num:
        return list(range(len(batch)))
    left = {place: set(words) for place, words in enumerate(batch)}
    places: list[int] = []
    while left and len(places) < num:
        place = max(left, key=lambda place: len(left[place]))
        seen = left.pop(place)
        places.append(place)
        left = {place: words - seen for place, words in left.items() if words - seen}
    return sorted(places)


@final
class Coming:
    """The points of a sweep, or of one batch of it.

    Args:
        batch: the words of each.
        first: the index of the first of them in the sweep.
        compose: what Hydra makes of words.
    """

    def __init__(self, batch: Batch, first: int, compose: Compose) -> None:
        self.batch, self.first, self._compose = batch, first, compose
        self.swept = swept_keys(batch)  # the keys that differ between the points

    def to_check(self) -> list[DictConfig]:
        """Those that stand for all of them. Raises what Hydra can't compose."""
        return [self.composed(place) for place in representative(self.batch)]

    def composed(self, place: int) -> DictConfig:
        config = self._compose(self.batch[place])
        with open_dict(config.hydra.job):
            config.hydra.job.num = config.hydra.job.id = self.first + place
        return config

    def next(self, index: int, num: int) -> Iterator[tuple[int, DictConfig]]:
        """Up to `num` points from `index` on, each with its index. Raises what Hydra can't compose."""
        for place in range(index - self.first, min(index - self.first + num, len(self.batch))):
            yield self.first + place, self.composed(place)

    def name(self, index: int) -> str:
        return name_of(self.batch[index - self.first], self.swept)
