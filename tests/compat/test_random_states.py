"""The layouts of the generators of Python and numpy."""

from __future__ import annotations

import random

import numpy as np

from tests.compat.sentences import needed


@needed("random.Random", by="recomputation of what draws from Python's generator")
def test_the_bytes_of_pythons_generator_are_its_state() -> None:
    from lowvram.compat.random_states import python_bytes

    for number in range(3):
        generator = random.Random(number)
        for _ in range(number * 400):
            generator.random()
        position, *words = np.frombuffer(python_bytes(generator), np.uint32).tolist()
        assert (*words, position) == generator.getstate()[1]


@needed("numpy.random.MT19937", by="recomputation of what draws from numpy's generator")
def test_the_bytes_of_numpys_generator_are_its_state() -> None:
    from lowvram.compat.random_states import numpy_bytes

    for number in range(3):
        bits = np.random.MT19937(number)
        np.random.RandomState(bits).random_sample(number * 400)
        *words, position = np.frombuffer(numpy_bytes(bits), np.uint32).tolist()
        state = bits.state["state"]
        assert words == state["key"].tolist()
        assert position == state["pos"]
