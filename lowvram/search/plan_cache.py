"""The plans of a search, each made once, several at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from lowvram.config.settings import Settings
from lowvram.planning.estimate import Fields, PlanDevice
from lowvram.planning.helpers import Helpers
from lowvram.planning.worker import CANT_BE_HAD, PlanJob, Planner
from lowvram.search.meshes import SHARDING, Meshes
from lowvram.search.space import Options, Plan, Space


@final
@dataclass
class PlanCache:
    """The plans of combinations, each made once. What is found doesn't depend on how many are made side by side."""

    planner: Planner
    settings: Settings
    choices: Mapping[str, str]
    plan_device: PlanDevice
    on_plan: Callable[[int], object]  # called with the number of plans after each new one
    is_measured: bool = False  # whether the best candidates are measured, on this machine
    helpers: Helpers | None = None  # that plan; None: this process does
    meshes: Meshes | None = None  # over which points are spread; None: they take one device
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)  # that were asked for
    made: dict[tuple[str, ...], Fields | Exception] = field(default_factory=dict)  # some of them ahead

    def plan(self, space: Space, options: Options) -> Plan:
        """The plan of a combination, as in a row, and under "changes" the options in it that aren't in use. Raises one
        of `CANT_BE_HAD`."""
        key = tuple(options.values())
        if key not in self.plans:
            self.prepare(space, [options])
            made = self.made[key]
            if isinstance(made, Exception):
                raise made
            changes = space.changes(options)
            if self.meshes is not None:
                changes = {SHARDING: options[SHARDING], **changes}
            self.plans[key] = {**made["plan"], "changes": changes}
        return self.plans[key]

    def prepare(self, space: Space, several: Iterable[Options]) -> None:
        """Plan combinations that may be asked for, side by side if there are helpers."""
        jobs: dict[tuple[str, ...], PlanJob] = {}
        for options in several:
            key = tuple(options.values())
            if key not in self.made:
                try:
                    jobs[key] = self.job(space, options)
                except CANT_BE_HAD as error:
                    self.made[key] = error
        keys, num_before = [*jobs], sum(not isinstance(each, Exception) for each in self.made.values())
        helpers = self.helpers or Helpers(0, self.planner.plan_or_error)
        for index, outcome in helpers.answers([*jobs.values()]):
            self.made[keys[index]] = outcome
            if not isinstance(outcome, Exception):
                num_before += 1
                self.on_plan(num_before)

    def job(self, space: Space, options: Options) -> PlanJob:
        """What is planned for a combination. Raises one of `CANT_BE_HAD`."""
        knobs = {group: space.knobs[group, name] for group, name in options.items()}
        choices, plan_device = {**self.choices, **options}, self.plan_device
        if self.meshes is not None:
            words = options[SHARDING]
            knobs, choices = {**knobs, **self.meshes.knobs[words]}, {**choices, **self.meshes.choices[words]}
            plan_device = self.meshes.spread(words, plan_device)
        return self.planner.job(replace(self.settings, groups=self.settings.groups | knobs), choices, plan_device)

    def has_made(self, options: Options) -> bool:
        return tuple(options.values()) in self.made

    @property
    def num_at_once(self) -> int:
        """How many combinations are planned at the same time."""
        return max(1, self.helpers.num) if self.helpers is not None else 1

    @property
    def num_data_ranks(self) -> int:
        """Over how many ranks the samples of a batch are shared out at least."""
        return 1 if self.meshes is not None else self.plan_device.target.num_data_ranks

    @property
    def fitting(self) -> list[Plan]:
        return [plan for plan in self.plans.values() if plan["fits"]]

    @property
    def counts_barely_fitting(self) -> bool:
        """Whether plans that fit only without their margin may be measured: `vram` limits what a probe allocates, so
        its run shows whether it fits. A margin that the user has typed holds."""
        settings = self.settings
        return self.is_measured and settings.vram_bytes is not None and settings.plan.margin is None

    @property
    def barely_fitting(self) -> list[Plan]:
        return [plan for plan in self.plans.values() if self.counts_barely_fitting and fits_barely(plan)]


def fits_barely(plan: Plan) -> bool:
    """Whether a plan fits into `vram`, but not with its margin. The host's memory must fit with its margin: nothing
    limits how much of it a probe takes."""
    host_bytes = (plan["host_bytes"] or 0) * (1 + plan["margin"])
    fits_host = host_bytes <= (plan["host_budget_bytes"] or math.inf)
    return not plan["fits"] and plan["least_vram_bytes"] <= plan["budget_bytes"] and fits_host
