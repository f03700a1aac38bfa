"""The largest value that fits, of needs that grow in many ways."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lowvram.search.largest import MOST_VALUE, Bracket, Tried, largest_that_fits

Load = Callable[[int], float]
MOST_TRIES = 48


def solved(load: Load, start: int = 32, unit: int = 1, most: int | None = None) -> Bracket:
    """The values that are tried of needs such as these; those above `most` are refused."""

    def attempt(value: int) -> Tried:
        refused = most is not None and value > most
        return Tried(value, None, "too large") if refused else Tried(value, load(value))

    return largest_that_fits(attempt, start, unit)


def drawn(generator: random.Random) -> tuple[Load, int, int]:
    """Needs that grow evenly, with a square, in stairs, or with a bend; where to begin, and the unit."""
    fixed, slope = generator.uniform(0, 0.95), 10 ** generator.uniform(-7, -2)
    square, stair = 10 ** generator.uniform(-14, -6), generator.choice([1, 2, 7, 64])
    bend = generator.randrange(1, 100_000)
    kinds: list[Load] = [
        lambda value: fixed + slope * value,
        lambda value: fixed + slope * value + square * value**2,
        lambda value: fixed + slope * (-(-value // stair) * stair),
        lambda value: max(fixed, slope * value),
        lambda value: fixed + slope * value + 5 * slope * max(0, value - bend),
    ]
    return generator.choice(kinds), generator.choice([1, 32, 1000]), generator.choice([1, 8, 128])


def test_drawn_needs_are_solved_in_few_tries() -> None:
    generator, nums = random.Random(20261201), list[int]()
    for _ in range(2000):
        load, start, unit = drawn(generator)
        bracket = solved(load, start, unit)
        nums.append(bracket.num_tried)
        if bracket.fitting:
            value = bracket.fitting[-1].value
            assert value % unit == 0
            assert load(value) <= 1 < load(value + unit)
        else:
            assert load(unit) > 1
    assert max(nums) <= MOST_TRIES
    assert sum(nums) / len(nums) < 10


def test_needs_that_fall_have_no_answer() -> None:
    bracket = solved(lambda value: 0.2 + 4 / value, start=8)
    assert bracket.falling == (8, 16)
    assert bracket.num_tried == 2
    assert solved(lambda value: 0.2 + value / 1000 - 0.04 * (value % 2)).falling is None  # as little as by rounding

    def attempt(value: int) -> Tried:
        return Tried(value, 0.9 + value / 1000 - (value >= 90) * 0.5, is_chosen=value >= 90)

    assert largest_that_fits(attempt, 8, 1).falling is None


def test_even_growth_takes_five_tries() -> None:
    bracket = solved(lambda value: 0.3 + value / 1000)
    assert bracket.fitting[-1].value == 700
    assert bracket.num_tried <= 5


def test_refused_values_bound_the_answer() -> None:
    bracket = solved(lambda value: value / 1e6, most=1024, unit=128)
    assert bracket.fitting[-1].value == 1024
    assert bracket.above == Tried(1152, None, "too large")


@pytest.mark.parametrize("most", [None, 7])
def test_nothing_fits(most: int | None) -> None:
    bracket = solved(lambda value: 1 + value / 1000, unit=8, most=most)
    assert not bracket.fitting
    assert bracket.above is not None
    assert bracket.above.value == 8


def test_what_takes_no_memory_ends() -> None:
    bracket = solved(lambda value: 0.5)
    assert bracket.above is None
    assert MOST_VALUE / 100 < bracket.fitting[-1].value <= MOST_VALUE


def test_a_stop_ends_it() -> None:
    values = iter([Tried(32, 0.5), None])
    bracket = largest_that_fits(lambda value: next(values), 32, 1)
    assert [each.value for each in bracket.fitting] == [32]
