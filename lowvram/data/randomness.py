"""Random numbers as a function of seed, epoch and index, so any process can make any sample without the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import count

import numpy as np
import torch

Key = tuple[int, int]  # index and epoch of a sample


class Stream(IntEnum):
    """What the numbers are used for. Streams are independent of each other."""

    ORDER = 0
    SHIFT = 1
    TRAIN = 2
    EVAL = 3
    POOL = 4
    BUCKETS = 5
    MASK = 6
    EVAL_MASK = 7


def generator(stream: Stream, seed: int, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """A generator whose numbers are a pure function of the arguments.

    Philox is a counter-based generator (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"):
    epoch and index are the high words of its counter, so neighbours are 2**128 numbers apart.
    """
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, epoch, index]))


def reading_order(num_samples: int, seed: int, start: int) -> Iterator[Key]:
    """The keys in reading order from position `start` on, without end: every epoch has its own permutation."""
    first_epoch, offset = divmod(start, num_samples)
    for epoch in count(first_epoch):
        permutation = generator(Stream.ORDER, seed, epoch).permutation(num_samples)
        for index in permutation[offset:]:
            yield int(index), epoch
        offset = 0


@contextmanager
def seeded(stream: Stream, seed: int, epoch: int = 0, index: int = 0) -> Iterator[None]:
    """Inside, the CPU's global generators are a function of the arguments; afterwards they are as before."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = int(generator(stream, seed, epoch, index).integers(2**32))
    torch.default_generator.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
