"""Batches from samples. Which samples a step gets is a pure function of the seed and the step's number.

So a loader gives the same batches with any number of workers, and resuming takes two integers: the seed and the step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, final

import torch

from lowvram.compat.torch_trees import tree_map
from lowvram.config.errors import require
from lowvram.config.settings import parse_bytes
from lowvram.core import host
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Part
from lowvram.core.slices import begin_of
from lowvram.data.ahead import make_batches_ahead
from lowvram.data.batch_sizes import BatchSizes
from lowvram.data.randomness import Key
from lowvram.data.source import Data, FollowedModel, Samples

Item = TypeVar("Item")


class Loader(ABC):
    """The configuration of one option of `loader`: which samples form a batch, how they are laid out in its tensors,
    and whether worker processes make it ahead of time."""

    takes_any_sizes: ClassVar[bool] = True  # whether batches may have other sizes than `train.batch_size`

    @abstractmethod
    def fit(self, data: Data, model: FollowedModel) -> Data:
        """The data, their spec changed to that of this loader's batches.

        Raises:
            BadInput: this loader can't handle such data, or not for this model.
        """

    @abstractmethod
    def most_rows(self, samples: Samples, batch_size: int) -> int:
        """The most rows, each padded to the full length, that a batch of `batch_size` samples takes."""

    @abstractmethod
    def batches(
        self, samples: Samples, sizes: BatchSizes, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        """Endless logical batches, from that of step `first_step` on. Close the generator when done. They are in host
        memory, pinned if the device is a card: the step moves them there part by part.

        Batches are always full: the last samples of an epoch share a batch with the first of the next epoch.
        With several ranks each rank loads its slice of every batch only. Where a batch doesn't divide by them, the
        first ranks have one sample more.
        """

    @abstractmethod
    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        """These samples as one part on the CPU."""


NO_LIMIT = 2**62  # bytes


class CacheKind(Enum):
    """Where decoded images are kept. The names are what a user types."""

    none = "nowhere: each is decoded when it is used"
    memory = "in memory, for this run"
    disk = "in a folder, for later runs too"


@dataclass(frozen=True)
class Stacked(Loader):
    """Samples in a random order, one per row, unchanged."""

    cache: CacheKind = field(default=CacheKind.none, kw_only=True)
    cache_limit: str | None = field(default="4GiB", kw_only=True)
    cache_folder: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        parse_bytes("loader.cache_limit", self.cache_limit)
        is_used = self.cache is CacheKind.disk or self.cache_folder is None
        require(is_used, "loader.cache_folder", self.cache_folder, "null unless loader.cache=disk")

    @property
    @abstractmethod
    def ahead(self) -> tuple[int, int]:
        """How many processes make batches ahead of time, and how many each keeps ready."""

    def fit(self, data: Data, model: FollowedModel) -> Data:
        allowed = "at most 1 for a data set that can only be read in its own order: each worker would read all of it"
        num_workers, _ = self.ahead
        require(num_workers <= 1 or not data.train.is_ordered, "loader.num_workers", num_workers, allowed)
        return data if self.cache is CacheKind.none else self.cached(data)

    def cached(self, data: Data) -> Data:
        """The data with images that come through the chosen cache."""
        from lowvram.data import image_cache  # most runs don't need it

        allowed = (
            "none for these data: only images that are read from files are decoded (the tokens of texts are kept on"
            " disk in any case)"
        )
        require(data.train.is_decoded, "loader.cache", self.cache.name, allowed)
        limit_bytes = parse_bytes("loader.cache_limit", self.cache_limit) or NO_LIMIT
        cache = image_cache.CACHES[self.cache.name](limit_bytes, self.cache_folder)
        return replace(data, train=data.train.through(cache), eval=data.eval.through(cache), cache=cache)

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        return batch_size

    def batches(
        self, samples: Samples, sizes: BatchSizes, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        slices = map(own_slice, batch_keys(samples, sizes, seed, first_step))
        return make_batches(slices, partial(part_of, partial(self.collate, samples)), *self.ahead, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        return collate(samples, keys)


@final
@dataclass(frozen=True)
class Inline(Stacked):
    """The training process makes each batch when it needs it."""

    @property
    def ahead(self) -> tuple[int, int]:
        return 0, 0


@final
@dataclass(frozen=True)
class Workers(Stacked):
    """Worker processes make batches ahead of time.

    Raises:
        BadInput: a value out of range.
    """

    num_workers: int = 2
    prefetch: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "at least 1: for none choose loader=inline"
        require(self.num_workers >= 1, "loader.num_workers", self.num_workers, allowed)
        require_prefetch(self.prefetch)

    @property
    def ahead(self) -> tuple[int, int]:
        return self.num_workers, self.prefetch


def require_workers(num_workers: int, prefetch: int) -> None:
    """Raises BadInput for numbers out of range. Without workers the training process makes the batches."""
    require(
        num_workers >= 0,
        "loader.num_workers",
        num_workers,
        "at least 0; with 0 the training process makes each batch when it needs it",
    )
    require_prefetch(prefetch)


def require_prefetch(prefetch: int) -> None:
    require(prefetch >= 1, "loader.prefetch", prefetch, "at least 1 batch for each worker")


def make_batches(
    keys: Iterator[Any], make: Callable[[Any], Part], num_workers: int, prefetch: int, device: torch.device
) -> Generator[Part, None, None]:
    """`make(key)` for each key, ready to be moved to the device: computed on demand or, with workers, ahead of time."""
    if num_workers:
        return make_batches_ahead(keys, make, num_workers, prefetch, device)
    return make_batches_now(keys, make, device)


def make_batches_now(
    keys: Iterator[Any], make: Callable[[Any], Part], device: torch.device
) -> Generator[Part, None, None]:
    batches = map(make, keys)
    if device.type == "cuda":
        batches = (batch.map(lambda tensor: host.pinned(tensor, device)) for batch in batches)
    yield from batches


@final
class TimedBatches(Iterator[Part]):
    """Batches from step `first_step` on; records the size of each and how long the training loop waited for it."""

    def __init__(self, batches: Generator[Part, None, None], first_step: int = 0) -> None:
        self.batches, self.first_step = batches, first_step
        self.waits_s: list[float] = []  # for each batch
        self.sizes: list[int] = []  # elements of all tensors of each batch

    def __next__(self) -> Part:
        start = time.perf_counter()
        try:
            batch = next(self.batches)
        finally:
            self.waits_s.append(time.perf_counter() - start)
        self.sizes.append(sum(tensor.numel() for tensor in batch.tensors()))
        return batch

    def close(self) -> None:
        """Ends the generator of the batches and its workers."""
        self.batches.close()


def eval_batches(
    samples: Samples, batch_size: int, device: torch.device, make: Callable[[Samples, list[Key]], Part] | None = None
) -> Iterator[tuple[Part, bool]]:
    """Pairs (batch, does it count?) with every sample once, in order, as in epoch 0. The last batch may be smaller.

    All ranks get equally many batches, because a sharded model computes on all ranks or on none: a rank without samples
    left gets a batch that doesn't count.

    Args:
        make: a loader's `collate`; None: samples are stacked.
    """
    make = make or collate
    keys = [(index, 0) for index in range(len(samples))]
    ranks = data_ranks()
    for first in range(0, len(keys), ranks.size * batch_size):
        start = first + ranks.rank * batch_size
        part = make(samples, keys[start : start + batch_size] or keys[:1])
        yield part.to(device), start < len(keys)


def every_sample(samples: Samples, batch_size: int, make: Callable[[Samples, list[Key]], Part]) -> Iterator[Part]:
    """Batches on the CPU with every sample once, in order, as in epoch 0, whatever the ranks. The last one may be
    smaller.

    Args:
        make: a loader's `collate`.
    """
    for first in range(0, len(samples), batch_size):
        yield make(samples, [(index, 0) for index in range(first, min(first + batch_size, len(samples)))])


def collate(samples: Samples, keys: list[Key]) -> Part:
    """The samples as one part on the CPU: inputs (num_samples, ...), targets (num_samples, ...)."""
    inputs, targets = zip(*(samples.sample(index, epoch) for index, epoch in keys), strict=True)
    return samples.with_soft(Part(stacked(inputs), stacked(targets)), keys)


def stacked(trees: Sequence[Any]) -> Any:
    """The inputs or the targets of samples, each a tensor or a nesting of tensors, stacked into those of a part."""
    return tree_map(lambda *tensors: torch.stack(tensors), trees[0], *trees[1:])


def batch_keys(samples: Samples, sizes: BatchSizes, seed: int, first_step: int) -> Iterator[list[Key]]:
    """The keys of each logical batch from step `first_step` on, without end. Samples have the same order whatever the
    sizes of batches."""
    keys = samples.keys(seed, sizes.before(first_step))
    for step in count(first_step):
        yield list(islice(keys, sizes.at(step)))


class Slice(NamedTuple, Generic[Item]):
    """What this rank computes of a logical batch: the keys of its samples, or rows of them; and how many all ranks have
    together, if they have different numbers."""

    items: list[Item]
    num_in_batch: int | None


def own_slice(items: list[Item]) -> Slice[Item]:
    """What this process computes of a logical batch."""
    ranks, num_items = data_ranks(), len(items)
    start, end = (begin_of(num_items, index, ranks.size) for index in (ranks.rank, ranks.rank + 1))
    return Slice(items[start:end], num_items if num_items % ranks.size else None)


def part_of(make: Callable[[list[Item]], Part], own: Slice[Item]) -> Part:
    """`make(items)` of a slice, which knows how many samples all ranks have together, if they have different
    numbers."""
    part = make(own.items)
    return part if own.num_in_batch is None else replace(part, num_in_batch=own.num_in_batch)
