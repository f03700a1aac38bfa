"""Chooses which combinations of options a search plans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from statistics import median
from typing import final

from lowvram.planning.worker import CANT_BE_HAD
from lowvram.search.meshes import SHARDING
from lowvram.search.plan_cache import PlanCache
from lowvram.search.ranking import adds_nothing, split_by_use
from lowvram.search.space import Estimate, Plan, Space, outside_bytes

MOST_PLANS = 40  # of combinations, beside those of single options
MEMORY_SLACK = 1.1  # combinations are planned if their tensors take at most this many times their room, as estimated
TIME_SLACK = 1.05  # and if their estimated time is at most this many times that of the last of the best
NUM_LEANEST = 8  # combinations of least memory that are planned before the search says that nothing fits


def explore(cache: PlanCache, space: Space, estimates: Sequence[Estimate], num_wanted: int) -> None:
    """Plan the combinations that should fit, those with the shortest estimated time first, until the next ones would be
    slower than the best `num_wanted` found. If nothing fits, plan those with the least estimated memory."""
    exploration = Exploration(cache, space, estimates, num_wanted)
    ordered = sorted(estimates, key=lambda one: (one.step_ms, one.num_changes))
    for place, combination in enumerate(ordered):
        if exploration.is_over(combination):
            break
        if exploration.is_worthwhile(combination):
            if not cache.has_made(combination.options):  # together with those that follow, by what is known now
                soon = islice(filter(exploration.is_worthwhile, ordered[place:]), cache.num_at_once)
                cache.prepare(space, [each.options for each in soon])
            exploration.plan(combination)
    if not cache.fitting:
        leanest = sorted(estimates, key=lambda one: one.least_bytes)[:NUM_LEANEST]
        cache.prepare(space, [each.options for each in leanest])
        for combination in leanest:
            with suppress(*CANT_BE_HAD):
                cache.plan(space, combination.options)


@final
class Exploration:
    """What the plans of combinations made so far say about the others.

    Args:
        num_wanted: of the best combinations.
    """

    def __init__(self, cache: PlanCache, space: Space, estimates: Sequence[Estimate], num_wanted: int) -> None:
        self.cache, self.space, self.num_wanted = cache, space, num_wanted
        self.base = cache.plan(space, space.base)
        self.outside_bytes = outside_bytes(self.base)
        self.sizes, self.times = size_ratios(cache, estimates, self.outside_bytes), [1.0]  # planned / estimated
        self.num_tried, self.latest_ms = 0, late_ms(cache.fitting, num_wanted)

    def step_ms(self, combination: Estimate) -> float:
        return combination.step_ms * median(self.times)

    def ratios(self, combination: Estimate) -> list[float]:
        return self.sizes[combination.options.get(SHARDING)]

    def is_over(self, combination: Estimate) -> bool:
        """Whether this one, and so those that are slower, needn't be planned."""
        return self.step_ms(combination) > self.latest_ms or self.num_tried == MOST_PLANS

    def is_worthwhile(self, combination: Estimate) -> bool:
        """Whether it should fit, and may be better than others that do."""
        step_ms = self.step_ms(combination)
        of_tensors = (combination.least_bytes - self.outside_bytes) * median(self.ratios(combination))
        fits = self.outside_bytes + of_tensors <= room_bytes(self.cache, self.base, step_ms)
        return fits and not adds_nothing(self.space.changes(combination.options), step_ms, self.cache.fitting)

    def plan(self, combination: Estimate) -> None:
        """Plan it, and learn from its plan, if there is one."""
        self.num_tried += 1
        try:
            plan = self.cache.plan(self.space, combination.options)
        except CANT_BE_HAD:
            return
        share = tensors_share(plan["least_vram_bytes"], combination.least_bytes, self.outside_bytes)
        self.ratios(combination).append(share)
        self.times.append(plan["step_ms"] / combination.step_ms)
        self.latest_ms = late_ms(self.cache.fitting, self.num_wanted)


def size_ratios(cache: PlanCache, estimates: Sequence[Estimate], outside: float) -> dict[str | None, list[float]]:
    """Of each mesh, planned by estimated memory of tensors: of what has been planned of it so far."""
    found = defaultdict[str | None, list[float]](lambda: [1.0])
    for each in estimates if cache.meshes is not None else ():
        if plan := cache.plans.get(tuple(each.options.values())):
            found[each.options[SHARDING]].append(tensors_share(plan["least_vram_bytes"], each.least_bytes, outside))
    return found


def room_bytes(cache: PlanCache, base: Plan, step_ms: float) -> float:
    """The estimated memory up to which a combination is planned: its margin must fit, too. Where plans may be measured
    that fit only without their margin, it needn't, as long as nothing as fast has been found that fits or barely fits:
    of such plans only the fastest is measured."""
    is_fastest = all(step_ms < plan["step_ms"] for plan in (*cache.fitting, *cache.barely_fitting))
    margin = 0 if cache.counts_barely_fitting and is_fastest else base["margin"]
    room, outside = base["budget_bytes"] / (1 + margin), outside_bytes(base)
    return outside + MEMORY_SLACK * max(0.0, room - outside)


def tensors_share(planned_bytes: float, estimated_bytes: float, outside: float) -> float:
    """Planned by estimated memory, without what no option changes."""
    estimated = estimated_bytes - outside
    return (planned_bytes - outside) / estimated if estimated > 0 and planned_bytes > outside else 1.0


def late_ms(fitting: Sequence[Plan], num_wanted: int) -> float:
    """The estimated time of a step above which a combination can't be among the best `num_wanted`."""
    useful, _ = split_by_use(fitting)
    return TIME_SLACK * useful[num_wanted - 1]["step_ms"] if len(useful) >= num_wanted else math.inf
