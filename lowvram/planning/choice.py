"""Chooses the blocks that a knob treats, where it leaves that to the plan (`Knob.with_blocks`): those that fit at the
least cost of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lowvram.config.settings import Settings
from lowvram.planning.block_memory import step_memory
from lowvram.planning.estimate import Fields
from lowvram.planning.recomputation import StepMemory, peak_with, proposals
from lowvram.planning.time.roofline import Rates
from lowvram.planning.trace.events import Trace


class Attempt(NamedTuple):
    """A point with some blocks chosen."""

    fields: Fields  # of its row, as the planner makes them
    trace: Trace

    @property
    def needed_bytes(self) -> float:
        """With the margin."""
        plan = self.fields["plan"]
        return plan["least_vram_bytes"] * (1 + plan["margin"])

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory. Its host may not: recomputation doesn't help there."""
        return self.needed_bytes <= self.fields["plan"]["budget_bytes"]


Plan = Callable[[tuple[int, ...]], Attempt]  # plans the point with these blocks, once


def choose_blocks(names: Sequence[str], attempt: Plan, rates: Rates) -> Fields:
    """The fields of the attempt that fits at the least cost; if none fits, of the smallest one.

    Dynamic programming proposes the cheapest blocks for ever lower peaks, by the sum of their tensors. Which proposal
    it takes is found by plans of a few of these, as what an allocator needs for tensors isn't their sum.

    Args:
        names: of the blocks, in the order of the forward pass.
    """
    every = tuple(range(len(names)))
    if attempt(()).fits:
        return attempt(()).fields
    memory = step_memory(attempt(()).trace, attempt(every).trace, names, rates)
    sets = [*proposals(memory), every]
    if not attempt(every).fits:  # it makes the most allocations, so fragments may need more than it frees
        sets.pop()
    if not attempt(sets[-1]).fits:
        return min(attempt(every), attempt(sets[-1]), key=lambda each: each.needed_bytes).fields
    guess = first_expected_to_fit(memory, sets, attempt)
    return attempt(sets[first_fitting(lambda number: attempt(sets[number]).fits, guess, len(sets) - 1)]).fields


def first_expected_to_fit(memory: StepMemory, sets: Sequence[tuple[int, ...]], attempt: Plan) -> int:
    """The first of some sets of blocks that fits if what is needed beside the tensors changes evenly with their sum,
    between what was planned for the first and for the last set."""
    most, least = attempt(sets[0]), attempt(sets[-1])
    highest, lowest = peak_with(memory, sets[0]), peak_with(memory, sets[-1])
    slope = (most.needed_bytes - least.needed_bytes) / max(1, highest - lowest)
    budget = lowest + (most.fields["plan"]["budget_bytes"] - least.needed_bytes) / slope if slope else lowest
    return next((number for number, blocks in enumerate(sets) if peak_with(memory, blocks) <= budget), len(sets) - 1)


def first_fitting(fits: Callable[[int], bool], guess: int, last: int) -> int:
    """The first number from 1 on that fits; 0 doesn't, and `last` does. Beside the guess it takes two or three calls,
    elsewhere a bisection."""
    low, high = 0, last
    for probe in (guess, guess - 1, guess + 1):
        if low < probe < high:
            low, high = (low, probe) if fits(probe) else (probe, high)
    return bisect_left(range(last), True, low + 1, high, key=fits)


def decide(settings: Settings, group: str, blocks: Sequence[int]) -> Settings:
    """The settings, with these blocks chosen for the knob of a group."""
    knob: Any = settings.groups[group].with_blocks(blocks)
    return replace(settings, groups={**settings.groups, group: knob})
