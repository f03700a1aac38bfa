from __future__ import annotations

import itertools

import numpy as np

from lowvram.data.randomness import Stream, generator


def test_the_same_arguments_give_the_same_numbers() -> None:
    assert np.array_equal(generator(Stream.TRAIN, 1, 2, 3).random(8), generator(Stream.TRAIN, 1, 2, 3).random(8))


def test_every_argument_counts() -> None:
    arguments = itertools.product([Stream.TRAIN, Stream.EVAL], [0, 1, 2**63 - 1], [0, 1, 2], [0, 1, 2])
    draws = np.concatenate([generator(*each).random(100) for each in arguments])
    assert len(np.unique(draws)) == len(draws)
