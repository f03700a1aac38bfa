"""Samples with what a teacher has said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, final

from lowvram.compress.distillation.cache import KEY, Cache
from lowvram.config.errors import BadInput, require
from lowvram.core.rig import Part
from lowvram.data.loader import stacked
from lowvram.data.randomness import Key
from lowvram.data.source import Data, Samples, Texts
from lowvram.data.spec import POSITIONS, DataSpec


def described(spec: DataSpec) -> str:
    """What samples are, as text."""
    return f"{spec.modality.value}, {spec.num_classes} classes, shape {list(spec.shape)}"


def check_rows(spec: DataSpec, allowed: str) -> None:
    """Raises BadInput for a loader that packs several samples into a row."""
    names = [name for name, _ in spec.layout.inputs] if spec.layout else []
    if POSITIONS in names:
        raise BadInput("loader", "packed", f"bucketed, inline or workers {allowed}")


def taught(data: Data, cache: Cache, seed: int, num_wanted: int | None) -> Data:
    """The data, whose samples to train on come with soft targets from the cache.

    Args:
        num_wanted: how many samples the run will train on; None: not known.

    Raises:
        BadInput: the cache is of other data, or of too few samples.
    """
    check_rows(data.spec, "with task.cache, which holds samples, not rows")
    about = cache.about
    require(
        num_wanted is None or num_wanted <= about.num_samples,
        KEY,
        cache.name,
        f"a cache of at least {num_wanted} samples, which this run reads: it has {about.num_samples}; run mode=teach "
        "with as many steps and as large a batch",
    )
    key = next(data.train.keys(seed, 0))
    cache.check(described(data.spec), len(data.train), seed, [key], collated(data.train, [key]))
    samples = TaughtTexts(data.train, cache) if isinstance(data.train, Texts) else Taught(data.train, cache)
    return replace(data, train=samples)


def collated(samples: Samples, keys: list[Key]) -> Part:
    inputs, targets = zip(*(samples.sample(index, epoch) for index, epoch in keys), strict=True)
    return Part(stacked(inputs), stacked(targets))


class Taught(Samples):
    """Samples with soft targets from a cache, in the order in which a run without one reads them."""

    def __init__(self, plain: Samples, cache: Cache) -> None:
        self.plain, self.cache, self.is_ordered = plain, cache, plain.is_ordered

    def keys(self, seed: int, start: int) -> Iterator[Key]:
        """After the last sample that the cache holds, the first follows again: so what is read ahead, or measured after
        the last step, is there, too."""
        num_samples = self.cache.about.num_samples
        start %= num_samples
        while True:
            yield from islice(self.plain.keys(seed, start), num_samples - start)
            start = 0

    def __len__(self) -> int:
        return len(self.plain)

    def sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        return self.plain.sample(index, epoch)

    def with_soft(self, part: Part, keys: list[Key]) -> Part:
        return replace(part, soft=self.cache.soft(keys, part))


@final
class TaughtTexts(Taught, Texts):
    """The same of texts of any length."""

    def __init__(self, plain: Texts, cache: Cache) -> None:
        super().__init__(plain, cache)
        self.texts, self.padded_length = plain, plain.padded_length

    def length(self, index: int, epoch: int) -> int:
        return self.texts.length(index, epoch)

    def longest(self, num_samples: int) -> int:
        return self.texts.longest(num_samples)
