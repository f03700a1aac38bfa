"""The samples that make the heaviest batch: where texts have lengths of their own, the longest."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from itertools import count
from typing import Any, final

from lowvram.core.rig import Part
from lowvram.data.randomness import Key
from lowvram.data.source import Samples, Texts


@final
class Heaviest(Texts):
    """As many of the texts as a batch has, the longest, in the order of their lengths, again and again. Where lengths
    are drawn, those of the first epoch.

    Args:
        num_samples: of a batch.
    """

    def __init__(self, texts: Texts, num_samples: int) -> None:
        self._texts, self._num_samples, self.padded_length = texts, num_samples, texts.padded_length
        self.is_ordered, self.is_decoded = texts.is_ordered, texts.is_decoded
        chosen = dict.fromkeys(texts.longest_of_each(), None)
        chosen |= dict.fromkeys(nlargest(num_samples, range(len(texts)), key=lambda index: texts.length(index, 0)))
        self._indices = list(chosen)[:num_samples]

    def __len__(self) -> int:
        return self._num_samples

    def keys(self, seed: int, start: int) -> Iterator[Key]:
        return ((self._indices[place % len(self._indices)], 0) for place in count(start))

    def length(self, index: int, epoch: int) -> int:
        return self._texts.length(index, epoch)

    def sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        return self._texts.sample(index, epoch)

    def with_soft(self, part: Part, keys: list[Key]) -> Part:
        return self._texts.with_soft(part, keys)


def heaviest(samples: Samples, num_samples: int) -> Samples:
    """The samples of which a loader makes the heaviest batch first; all of them where each is as heavy as any."""
    return Heaviest(samples, num_samples) if isinstance(samples, Texts) else samples
