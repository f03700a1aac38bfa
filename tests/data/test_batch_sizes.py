"""The sizes of batches: pure functions of the step, which samples don't depend on."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from lowvram.data.batch_sizes import BatchSizes, RisingSizes, SameSize
from lowvram.data.loader import batch_keys
from tests.data.test_loader import Numbers

SIZES = [SameSize(8), RisingSizes(4, 32, 200), RisingSizes(8, 32, 1), RisingSizes(3, 32, 500), RisingSizes(8, 8, 50)]


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_samples_before_a_step_are_those_of_all_earlier_batches(sizes: BatchSizes) -> None:
    forwards = [sizes.at(step) for step in range(100)]
    assert [sizes.before(step) for step in range(101)] == [sum(forwards[:step]) for step in range(101)]
    assert forwards[-1] == sizes.largest == max(forwards)
    assert all(before <= after for before, after in pairwise(forwards))
    assert [sizes.at(step) for step in reversed(range(100))] == forwards[::-1]


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
@pytest.mark.parametrize("num_samples", [0.5, 1, 8, 31.9, 200, 1000])
def test_so_many_steps_take_so_many_samples(sizes: BatchSizes, num_samples: float) -> None:
    steps = sizes.steps_for(num_samples)
    assert sizes.before(steps - 1) < num_samples <= sizes.before(steps)


def test_batches_grow_in_a_straight_line_of_samples() -> None:
    """In multiples of the first one, and to the full size after so many samples."""
    sizes = RisingSizes(8, 64, 640)
    grown = [(sizes.before(step), sizes.at(step)) for step in range(60)]
    assert grown[0] == (0, 8)
    for seen, size in grown:
        assert size == (64 if seen >= 640 else (8 + 56 * seen // 640) // 8 * 8)
    assert {size for _, size in grown} == {8, 16, 24, 32, 40, 48, 56, 64}


def test_only_the_steps_that_are_asked_for_are_counted() -> None:
    assert RisingSizes(1, 1024, 10**15).at(1000) == 1


@pytest.mark.parametrize("first_step", [0, 3, 40])
def test_samples_have_one_order_whatever_the_sizes(first_step: int) -> None:
    """Across epochs, and from any step on."""
    samples, sizes = Numbers(50), RisingSizes(4, 32, 200)
    batches = list(islice(batch_keys(samples, sizes, 0, first_step), 12))
    assert [len(batch) for batch in batches] == [sizes.at(first_step + number) for number in range(12)]
    seen = [key for batch in batches for key in batch]
    assert seen == list(islice(samples.keys(0, sizes.before(first_step)), len(seen)))
