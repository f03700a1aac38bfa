"""schedule: pure functions of the step, from where to where they say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from lowvram.config.errors import BadInput
from lowvram.data.batch_sizes import SameSize
from lowvram.loops.schedule import BatchRule, Constant, Cosine, Linear, Schedule, WarmupCosine

SIZES = SameSize(8)
SCHEDULES = [
    Constant(),
    Cosine(),
    Cosine(floor=0.0),
    WarmupCosine(),
    WarmupCosine(warmup_frac=0.3, floor=0.2),
    Linear(),
    Linear(warmup_frac=0.3, floor=0.2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 1000])
def test_factors_are_pure_and_between_0_and_1(schedule: Schedule, num_steps: int) -> None:
    forwards = [schedule.factor(step, num_steps, SIZES) for step in range(num_steps)]
    backwards = [schedule.factor(step, num_steps, SIZES) for step in reversed(range(num_steps))]
    assert forwards == backwards[::-1]
    assert all(0 <= factor <= 1 for factor in forwards)
    assert forwards[0] > 0


def test_constant_stays() -> None:
    assert {Constant().factor(step, 10, SIZES) for step in range(20)} == {1.0}


def test_cosine_goes_from_1_to_its_floor_and_stays_there() -> None:
    schedule = Cosine(floor=0.2)
    assert schedule.factor(0, 11, SIZES) == 1.0
    assert schedule.factor(5, 11, SIZES) == pytest.approx(0.6)
    assert schedule.factor(10, 11, SIZES) == pytest.approx(0.2)
    assert schedule.factor(100, 11, SIZES) == pytest.approx(0.2)
    assert all(before > after for before, after in pairwise(schedule.factor(step, 11, SIZES) for step in range(11)))


def test_warm_up_rises_in_a_straight_line_and_then_falls() -> None:
    schedule = WarmupCosine(warmup_frac=0.25, floor=0.1)
    factors = [schedule.factor(step, 20, SIZES) for step in range(20)]
    assert factors[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert all(before > after for before, after in pairwise(factors[5:]))
    assert factors[-1] == pytest.approx(0.1)


def test_linear_falls_in_a_straight_line_as_that_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=10)
    for step in range(10):
        assert Linear().factor(step, 10, SIZES) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    factors = [Linear(warmup_frac=0.2, floor=0.5).factor(step, 10, SIZES) for step in range(11)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *(1 - step / 16 for step in range(9))])


def test_without_warm_up_it_is_cosine() -> None:
    for step in range(10):
        assert WarmupCosine(warmup_frac=0.0).factor(step, 10, SIZES) == Cosine().factor(step, 10, SIZES)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_values_out_of_range_are_named(value: float) -> None:
    for make in (lambda: Cosine(floor=value), lambda: WarmupCosine(floor=value), lambda: Linear(floor=value)):
        with pytest.raises(BadInput, match=rf"schedule\.floor={value}: must be between 0 and 1"):
            make()
    with pytest.raises(BadInput, match=rf"schedule\.warmup_frac={value}: must be at least 0 and below 1"):
        WarmupCosine(warmup_frac=value)


def test_warm_up_takes_not_all_steps() -> None:
    with pytest.raises(BadInput, match=r"schedule\.warmup_frac=1\.0"):
        WarmupCosine(warmup_frac=1.0)


def test_factors_are_those_of_steps_to_the_last_bit() -> None:
    """Batches of one size: going by samples is going by steps."""
    for size in (1, 7, 32, 1000):
        for step in range(50):
            by_step = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step / 49)))
            assert Cosine().factor(step, 50, SameSize(size)) == by_step
            warmed = WarmupCosine(warmup_frac=0.2).factor(step, 50, SameSize(size))
            by_step = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * ((step - 10) / 39)))
            assert warmed == ((step + 1) / 11 if step < 10 else by_step)


@pytest.mark.parametrize(("rule", "by"), [("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)])
@pytest.mark.parametrize("plain", [Constant(), Cosine(), WarmupCosine(), Linear()], ids=str)
def test_a_rule_multiplies_every_factor(plain: Schedule, rule: str, by: float) -> None:
    ruled = replace(plain, batch_rule=BatchRule[rule], base_batch_size=32)
    for step in range(10):
        assert ruled.factor(step, 10, SameSize(512)) == by * plain.factor(step, 10, SameSize(512))
        assert ruled.factor(step, 10, SameSize(32)) == plain.factor(step, 10, SameSize(32))


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), WarmupCosine(), Linear()], ids=str)
def test_a_warm_up_in_samples_is_as_long_whatever_the_batch(schedule: Schedule) -> None:
    warmed = replace(schedule, warmup_samples=96)
    for size, steps in ((8, 12), (32, 3), (96, 1), (200, 1)):
        factors = [warmed.factor(step, 40, SameSize(size)) for step in range(40)]
        assert factors[:steps] == pytest.approx([(step + 1) * size / (96 + size) for step in range(steps)])
        assert factors[steps - 1] < 1
        if size * steps == 96:
            assert factors[steps] == 1
    assert replace(schedule, warmup_samples=0).factor(0, 40, SIZES) == 1


def test_a_rule_needs_the_batch_that_the_learning_rate_is_for() -> None:
    with pytest.raises(
        BadInput, match=r"schedule\.base_batch_size=null: must be at least 1 with schedule\.batch_rule=sqrt"
    ):
        Constant(batch_rule=BatchRule.sqrt)
    with pytest.raises(BadInput, match=r"schedule\.base_batch_size=0"):
        Constant(base_batch_size=0)
    with pytest.raises(BadInput, match=r"schedule\.warmup_samples=-1"):
        Cosine(warmup_samples=-1)
    assert Constant(base_batch_size=32).factor(0, 1, SIZES) == 1  # so that a sweep can go through all rules
