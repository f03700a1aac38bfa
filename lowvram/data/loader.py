"""Batches from samples. Which samples a step sees is a pure function of the seed and the step's number.

So every loader gives the same batches, and resuming takes two integers: the seed and the step.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowvram.compat.torch_data import end_workers
from lowvram.config.errors import require
from lowvram.core.ranks import num_ranks, rank
from lowvram.core.rig import Part
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, Samples

Key = tuple[int, int]  # index and epoch of a sample
Item = TypeVar("Item")


class Loader(ABC):
    """The configuration of one option of `loader`: which samples meet in a batch, how they lie there, and who makes it
    when."""

    @abstractmethod
    def fit(self, data: Data, model: FollowedModel) -> Data:
        """The data as this loader has them.

        Raises:
            BadInput: it can do nothing with such data, or not for this model.
        """

    @abstractmethod
    def most_rows(self, samples: Samples, batch_size: int) -> int:
        """How many rows of the data's whole length a batch of so many samples takes, at most."""

    @abstractmethod
    def batches(
        self, samples: Samples, batch_size: int, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        """Endless logical batches on the device, from that of step `first_step` on. Close it when done.

        Batches are always full: what is left of an epoch is the start of a batch that the next epoch fills.
        With several ranks each gets, and loads, its slice of every batch.
        """

    @abstractmethod
    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        """These samples as one part on the CPU."""


class Stacked(Loader):
    """Samples in a random order, one a row, as they are."""

    num_workers: int
    prefetch: int

    def fit(self, data: Data, model: FollowedModel) -> Data:
        return data

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        return batch_size

    def batches(
        self, samples: Samples, batch_size: int, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        keys = batch_keys(len(samples), batch_size, seed, first_step)
        return made(keys, partial(self.collate, samples), self.num_workers, self.prefetch, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        return collate(samples, keys)


@final
@dataclass(frozen=True)
class Inline(Stacked):
    """Each batch is made when it is asked for, by whoever asks."""

    num_workers = 0
    prefetch = 0


@final
@dataclass(frozen=True)
class Workers(Stacked):
    """Batches are made ahead of time, in processes of their own.

    Raises:
        BadInput: a value out of range.
    """

    num_workers: int = 2
    prefetch: int = 2

    def __post_init__(self) -> None:
        inline = "at least 1: for none choose loader=inline"
        require(self.num_workers >= 1, "loader.num_workers", self.num_workers, inline)
        require_prefetch(self.prefetch)


def require_workers(num_workers: int, prefetch: int) -> None:
    """Raises BadInput for numbers out of range. No worker: the process itself makes the batches."""
    require(num_workers >= 0, "loader.num_workers", num_workers, "at least 0: then batches are made when asked for")
    require_prefetch(prefetch)


def require_prefetch(prefetch: int) -> None:
    require(prefetch >= 1, "loader.prefetch", prefetch, "at least 1 batch for each worker")


def made(
    keys: Iterator[Any], make: Callable[[Any], Part], num_workers: int, prefetch: int, device: torch.device
) -> Generator[Part, None, None]:
    """What `make` makes of each key, on the device: when it is asked for or, with workers, ahead of time."""
    if num_workers:
        return made_ahead(keys, make, num_workers, prefetch, device)
    return made_now(keys, make, device)


def made_now(keys: Iterator[Any], make: Callable[[Any], Part], device: torch.device) -> Generator[Part, None, None]:
    for key in keys:
        yield make(key).to(device)


def made_ahead(
    keys: Iterator[Any], make: Callable[[Any], Part], num_workers: int, prefetch: int, device: torch.device
) -> Generator[Part, None, None]:
    """The same by processes, each of which keeps `prefetch` batches ready."""
    loader = DataLoader(
        MadeBatches(make),
        batch_size=None,  # a key of the dataset is already a whole batch
        sampler=keys,  # pyright: ignore[reportArgumentType]
        num_workers=num_workers,
        prefetch_factor=prefetch,
        pin_memory=device.type == "cuda",
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else starting draws from the global one, and dropout would change
    )
    with interrupts_blocked():
        workers = iter(loader)
    try:
        for part in workers:
            yield part.to(device, non_blocking=True)
    except ConnectionError as error:  # it died while it handed a batch over
        raise RuntimeError("DataLoader worker exited unexpectedly") from error
    finally:
        end_workers(workers)


@final
class MadeBatches(Dataset[Part]):
    """A torch dataset whose items are batches."""

    def __init__(self, make: Callable[[Any], Part]) -> None:
        self.make = make

    def __getitem__(self, key: Any) -> Part:
        return self.make(key)


@final
class Waited(Iterator[Part]):
    """Batches from a step on, how large they are and how long their reader has waited for them."""

    def __init__(self, batches: Generator[Part, None, None], first_step: int = 0) -> None:
        self.batches, self.first_step = batches, first_step
        self.waits_s: list[float] = []  # for each batch
        self.sizes: list[int] = []  # numbers in each batch

    def __next__(self) -> Part:
        start = time.perf_counter()
        try:
            batch = next(self.batches)
        finally:
            self.waits_s.append(time.perf_counter() - start)
        self.sizes.append(sum(tensor.numel() for tensor in batch.tensors()))
        return batch

    def close(self) -> None:
        """No more batches: ends what makes them."""
        self.batches.close()


def eval_batches(
    samples: Samples, batch_size: int, device: torch.device, make: Callable[[Samples, list[Key]], Part] | None = None
) -> Iterator[tuple[Part, bool]]:
    """Every sample once, in order, as in epoch 0, and whether the batch counts. The last batch may be smaller.

    Of several ranks each gets its share, and all get as many batches: whoever has no samples left gets one that doesn't
    count, because a model that is sharded computes on all ranks or on none.

    Args:
        make: a loader's `collate`; None: samples lie there as they are.
    """
    make = make or collate
    keys = [(index, 0) for index in range(len(samples))]
    for first in range(0, len(keys), num_ranks() * batch_size):
        start = first + rank() * batch_size
        part = make(samples, keys[start : start + batch_size] or keys[:1])
        yield part.to(device), start < len(keys)


def collate(samples: Samples, keys: list[Key]) -> Part:
    """The samples as one part on the CPU: inputs (num_samples, ...), targets (num_samples, ...)."""
    inputs, targets = zip(*(samples.sample(index, epoch) for index, epoch in keys), strict=True)
    return Part(stacked(inputs), torch.stack(targets))


def stacked(inputs: Sequence[Any]) -> Tensor | dict[str, Tensor]:
    """Inputs of samples, each a tensor or tensors by name, as those of a part."""
    first = inputs[0]
    if isinstance(first, Mapping):
        return {name: torch.stack([each[name] for each in inputs]) for name in first}
    return torch.stack(list(inputs))


def batch_keys(num_samples: int, batch_size: int, seed: int, first_step: int) -> Iterator[list[Key]]:
    """The samples of each batch from step `first_step` on, without end; of several ranks each gets its slice."""
    keys = reading_order(num_samples, seed, first_step * batch_size)
    while True:
        yield slice_of(list(islice(keys, batch_size)), rank(), num_ranks())


def slice_of(keys: list[Item], index: int, num_slices: int) -> list[Item]:
    """One of `num_slices` slices of (nearly) equal length, the longer ones first, as torch's tensor_split cuts."""
    length, num_longer = divmod(len(keys), num_slices)
    start = index * length + min(index, num_longer)
    return keys[start : start + length + (index < num_longer)]


def reading_order(num_samples: int, seed: int, start: int) -> Iterator[Key]:
    """The order of reading from position `start` on: every epoch is a permutation of its own, without end."""
    first_epoch, offset = divmod(start, num_samples)
    for epoch in count(first_epoch):
        permutation = generator(Stream.ORDER, seed, epoch).permutation(num_samples)
        for index in permutation[offset:]:
            yield int(index), epoch
        offset = 0


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see a Ctrl-C, which reaches all processes of a terminal: their parent answers it,
    and ends them. It comes through to the parent itself afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
