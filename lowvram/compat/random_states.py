"""The states of Python's and numpy's generators, read as bytes in a millionth of a second, where the public functions
take up to sixty times as long: recomputation reads them around every forward pass of a block."""

from __future__ import annotations

import random
from ctypes import string_at
from typing import Any

NUM_WORDS = 624  # of a Mersenne twister, beside its position
NUM_BYTES = 4 * (NUM_WORDS + 1)


def python_bytes(generator: random.Random) -> bytes:
    """The position and the words of a generator of the class random.Random, or of one derived from it, each of 4
    bytes.

    The layout of CPython's RandomObject (position, then words, after the object's head), since before 3.11: getstate
    makes 625 numbers. Replaced by a public function, if Python makes one.
    """
    return string_at(id(generator) + object.__basicsize__, NUM_BYTES)


def numpy_bytes(bit_generator: Any) -> bytes:
    """The words and the position of an np.random.MT19937, each of 4 bytes.

    The layout of numpy's mt19937_state behind the public `ctypes.state_address`, since 1.17: `state` copies number by
    number. Replaced by a public function, if numpy makes one.
    """
    return string_at(bit_generator.ctypes.state_address, NUM_BYTES)
