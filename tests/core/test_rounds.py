"""A plan follows three rounds of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lowvram.core.rounds import followed, three_followed


@pytest.mark.parametrize("backwards", [False, True])
def test_three_rounds_stand_for_all_and_the_same_ones_in_both_directions(backwards: bool) -> None:
    times, done = [1], list[tuple[int, int]]()

    @contextmanager
    def stands_for(number: int) -> Iterator[None]:
        times.append(number)
        yield
        times.pop()

    with three_followed(stands_for):
        for number in followed(range(8), backwards):
            done.append((number, times[-1]))
    assert done == [(0, 1), (4, 6), (7, 1)][:: -1 if backwards else 1]


@pytest.mark.parametrize("backwards", [False, True])
def test_elsewhere_all_rounds_are_done(backwards: bool) -> None:
    assert [*followed(range(8), backwards)] == [*range(8)][:: -1 if backwards else 1]
