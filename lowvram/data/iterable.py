"""data=external with data sets that can only be read from their start, in their own order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import count, islice
from typing import Any, final

from torch.utils.data import IterableDataset

from lowvram.data.randomness import Key, Stream, seeded


def is_iterable(dataset: Any) -> bool:
    """Whether a data set can be read again and again, but gives no sample by its number."""
    is_of_torch = isinstance(dataset, IterableDataset)  # it inherits a __getitem__ that raises
    return isinstance(dataset, Iterable) and (is_of_torch or "__getitem__" not in dir(dataset))


@final
class Iterated:
    """The samples of an iterable data set by number: after its last sample the first follows again.

    To find a sample all before it are read, each with its own random seed. Training goes forwards, so it reads each
    once; going back starts anew.
    """

    def __init__(self, dataset: Iterable[Any], stream: Stream, seed: int) -> None:
        self.dataset, self.stream, self.seed = dataset, stream, seed
        self.epoch = 0
        self.samples: Iterator[Any] = iter(())
        self.place = -1  # of the sample that was read last
        self.last: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.place < 0 or index < self.place:
            with seeded(self.stream, self.seed):
                self.begin(0)
            self.place = -1
        while self.place < index:
            self.place += 1
            with seeded(self.stream, self.seed, 0, self.place):
                self.last = self.following()
        return self.last

    def begin(self, epoch: int) -> None:
        """Start to read the data set from its first sample. Those of the library datasets shuffle anew for each
        epoch."""
        self.epoch = epoch
        if set_epoch := getattr(self.dataset, "set_epoch", None):
            set_epoch(epoch)
        self.samples = iter(self.dataset)

    def following(self) -> Any:
        for sample in self.samples:
            return sample
        self.begin(self.epoch + 1)
        for sample in self.samples:
            return sample
        raise RuntimeError(f"the {type(self.dataset).__name__} gives no samples when it is read again")

    def __len__(self) -> int:
        """Of one epoch. Raises TypeError if the data set doesn't know it."""
        if isinstance(self.dataset, Sized):
            return len(self.dataset)
        raise TypeError(f"a {type(self.dataset).__name__} doesn't know how many samples it has")


def in_their_order(start: int) -> Iterator[Key]:
    """The keys of an iterable's samples from position `start` on, without end."""
    return ((index, 0) for index in count(start))


def kept(dataset: Iterable[Any], num_samples: int, seed: int) -> list[Any]:
    """The first samples of an iterable data set, in memory."""
    with seeded(Stream.EVAL, seed):
        return list(islice(dataset, num_samples))
