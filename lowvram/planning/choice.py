"""Chooses what a knob leaves to the plan (`Knob.left_to_plan`): the blocks that it treats, how many each stage of a
pipeline has, or how many stay on the device, such that the step fits at the least cost of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lowvram.config.settings import Settings
from lowvram.core.structure import Structure
from lowvram.knobs.sharding.cut import balanced, sizes_of_stages
from lowvram.loops.setup import LeftToPlan
from lowvram.planning.block_memory import step_memory
from lowvram.planning.estimate import Fields
from lowvram.planning.recomputation import StepMemory, peak_with, proposals
from lowvram.planning.time.roofline import Rates
from lowvram.planning.trace.events import Trace

MOST_CUTS = 6  # that are planned
AS_FAST = 1.005  # times another step's time: plans aren't more exact


class Attempt(NamedTuple):
    """A point with something chosen."""

    fields: Fields  # of its row, as the planner makes them
    stages: Sequence[Trace]  # of a pipeline, that of each stage; else one

    @property
    def needed_bytes(self) -> float:
        """With the margin."""
        plan = self.fields["plan"]
        return plan["least_vram_bytes"] * (1 + plan["margin"])

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory. Its host may not: recomputation doesn't help there."""
        return self.needed_bytes <= self.fields["plan"]["budget_bytes"]


Plan = Callable[[tuple[int, ...]], Attempt]  # plans the point with these numbers, once


class About(NamedTuple):
    """What a choice needs to know of a point."""

    knob: Any  # that leaves the choice
    known: Structure  # of its model
    names: Sequence[str]  # of its blocks, as knobs build it, in the order of the forward pass
    num_stages: int  # of its pipeline
    rates: Rates


def choose_blocks(about: About, attempt: Plan) -> Fields:
    """Which blocks are treated, such as recomputed: the fields of the attempt that fits at the least cost; if none
    fits, of the smallest one.

    Dynamic programming proposes the cheapest blocks for ever lower peaks, by the sum of their tensors. Which proposal
    it takes is found by plans of a few of these, as what an allocator needs for tensors isn't their sum.
    """
    names = about.names
    every = tuple(range(len(names)))
    if attempt(()).fits:
        return attempt(()).fields
    memory = step_memory(largest(attempt(())), largest(attempt(every)), names, about.rates)
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


def choose_cut(about: About, attempt: Plan) -> Fields:
    """How many blocks each stage of a pipeline has: the fields of the fastest cut (by operations) that is expected to
    fit, and does; if none fits, of the smallest one that was found.

    What a stage needs is taken to be linear in the number of its blocks.
    """
    costs = about.knob.costs(about.known)
    tried = dict[tuple[int, ...], Attempt]()
    cut = tuple(sizes_of_stages(costs, about.num_stages, None))
    while cut not in tried and len(tried) < MOST_CUTS:
        tried[cut] = attempt(cut)
        if tried[cut].fits:
            return tried[cut].fields
        lines = lines_of(tried, about.num_stages)
        cut = fitting_cut(costs, lines, bytes_of_a_stage(tried[cut]))
        if cut in tried:
            cut = smallest_cut(len(costs) - 2, lines)
    return min(tried.values(), key=lambda each: each.needed_bytes).fields


class Line(NamedTuple):
    """What a stage needs, by the number of its blocks."""

    base_bytes: float
    of_block_bytes: float

    def at(self, num_blocks: int) -> float:
        return self.base_bytes + num_blocks * self.of_block_bytes


def lines_of(tried: Mapping[tuple[int, ...], Attempt], num_stages: int) -> list[Line]:
    """Those of the stages, by the cuts planned so far: through the last two numbers of blocks that a stage has had. A
    stage that has had one alone is taken to need as much for a block as the nearest that has had two."""
    known: list[list[tuple[int, int]]] = []
    for stage in range(num_stages):
        sizes = {cut[stage]: each.stages[stage].sums().peak_bytes for cut, each in tried.items()}
        known.append([*sizes.items()][-2:])
    of_two = {
        stage: max(1.0, (two[1][1] - two[0][1]) / (two[1][0] - two[0][0])) for stage, two in enumerate(known) if two[1:]
    }
    at_most = min(num_bytes / number for sizes in known for number, num_bytes in sizes)
    lines = list[Line]()
    for stage, sizes in enumerate(known):
        nearest = min(of_two, key=lambda other: abs(other - stage), default=None)
        of_block_bytes = at_most if nearest is None else of_two[nearest]
        number, num_bytes = sizes[-1]
        lines.append(Line(num_bytes - number * of_block_bytes, of_block_bytes))
    return lines


def bytes_of_a_stage(attempt: Attempt) -> float:
    """What the tensors of a stage may need in a step that fits."""
    plan = attempt.fields["plan"]
    beside = plan["least_vram_bytes"] - max(each.sums().peak_bytes for each in attempt.stages)
    return plan["budget_bytes"] / (1 + plan["margin"]) - beside


def fitting_cut(costs: Sequence[float], lines: Sequence[Line], most_bytes: float) -> tuple[int, ...]:
    """The fastest cut of which each stage is expected to need so much at most; if there is none, the smallest."""
    num_blocks = len(costs) - 2
    most = [int(max(0.0, most_bytes - line.base_bytes) / line.of_block_bytes) for line in lines]
    if min(most) < 1 or sum(most) < num_blocks:
        return smallest_cut(num_blocks, lines)
    return tuple(balanced(costs, len(lines), most))


def smallest_cut(num_blocks: int, lines: Sequence[Line]) -> tuple[int, ...]:
    """The one whose largest stage is expected to need the least."""
    cut = [1] * len(lines)
    for _ in range(num_blocks - len(lines)):
        stage = min(range(len(lines)), key=lambda stage: lines[stage].at(cut[stage] + 1))
        cut[stage] += 1
    return tuple(cut)


def choose_resident(about: About, attempt: Plan) -> Fields:
    """Which blocks, the first ones, stay on the device: as many as fit; none, if the step is as fast without."""
    num_blocks = len(about.names)
    none, every = attempt(()), attempt(tuple(range(num_blocks)))
    if is_as_fast(none, every) or not none.fits:
        return none.fields
    if every.fits:
        return every.fields
    of_block = (every.needed_bytes - none.needed_bytes) / num_blocks
    most = int((none.fields["plan"]["budget_bytes"] - none.needed_bytes) / max(1.0, of_block))
    leaving = first_fitting(
        lambda number: attempt(tuple(range(num_blocks - number))).fits, num_blocks - most, num_blocks
    )
    return attempt(tuple(range(num_blocks - leaving))).fields


def is_as_fast(one: Attempt, other: Attempt) -> bool:
    """Whether a plan's step takes no longer than another's; False if the times aren't known."""
    its_ms, other_ms = one.fields["plan"]["step_ms"], other.fields["plan"]["step_ms"]
    return None not in (its_ms, other_ms) and its_ms <= other_ms * AS_FAST


CHOOSERS: Mapping[str, Callable[[About, Plan], Fields]] = {
    "blocks": choose_blocks,
    "cut": choose_cut,
    "resident": choose_resident,
}


def largest(attempt: Attempt) -> Trace:
    """The trace of the stage that takes the most memory."""
    return max(attempt.stages, key=lambda trace: trace.sums().peak_bytes)


def decide(settings: Settings, left: LeftToPlan, numbers: Sequence[int]) -> Settings:
    """The settings, with these numbers chosen."""
    knob: Any = settings.groups[left.group]
    knob = replace(knob, **{left.field: knob.chosen_value(numbers)})
    return replace(settings, groups={**settings.groups, left.group: knob})
