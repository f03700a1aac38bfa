"""Loops of which a plan follows three rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lowvram.core.rounds import followed, three_followed


def test_in_a_real_run_all_rounds_are_made() -> None:
    assert list(followed(range(9))) == list(range(9))


@pytest.mark.parametrize("num", range(7))
def test_a_plan_counts_all_but_makes_three(num: int) -> None:
    made, counts, weights = list[int](), list[int](), [1]

    @contextmanager
    def stands_for(times: int) -> Iterator[None]:
        weights.append(times)
        yield
        weights.pop()

    with three_followed(stands_for):
        for index in followed(range(num)):
            counts += weights[-1:]
            made.append(index)
    assert sum(counts) == num
    assert len(counts) == min(num, 3)
    assert made[-1:] == list(range(num))[-1:]
    assert list(followed(range(num))) == list(range(num))
