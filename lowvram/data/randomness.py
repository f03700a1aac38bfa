"""Random numbers as a function of seed, epoch and index, so any process can make any sample without the others."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What the numbers are used for. Streams are independent of each other."""

    ORDER = 0
    SHIFT = 1
    TRAIN = 2
    EVAL = 3
    POOL = 4
    BUCKETS = 5


def generator(stream: Stream, seed: int, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """A generator whose numbers are a pure function of the arguments.

    Philox is a counter-based generator (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"):
    epoch and index are the high words of its counter, so neighbours are 2**128 numbers apart.
    """
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, epoch, index]))
