"""Plans points: many of them in one process, which only runs fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import nn

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.registry import knob_of
from lowvram.config.settings import KNOB_GROUPS, PLAIN, TEACH, Settings, check_batch_size, zero_grad_of
from lowvram.core.assemble import block_names, skeleton
from lowvram.core.device import card_of, choose_device
from lowvram.core.fact import ModelFact
from lowvram.core.free_memory import free_host_bytes
from lowvram.core.knob import Knob, Stage, is_compiled, model_facts, passes_of
from lowvram.data.source import Data
from lowvram.loops.fields import about_model
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.setup import (
    LeftToPlan,
    acting_allocator,
    can_replace,
    open_data,
    require_budget,
    row_of,
    undecided,
    wanted_ranks,
    with_steps,
)
from lowvram.loops.skipping import skips_of
from lowvram.planning.advice import out_of_memory_advice
from lowvram.planning.cache import TraceCache
from lowvram.planning.choice import CHOOSERS, About, Attempt, decide
from lowvram.planning.devices import DeviceSpec, find_device, load_device
from lowvram.planning.estimate import Fields, Pipeline, PlanDevice, needs
from lowvram.planning.scaling import ScaledTrace, TraceScaler
from lowvram.planning.target import Target
from lowvram.planning.time.calibration import Calibrations
from lowvram.planning.time.roofline import DataSheet
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.trace.tracer import DeclarationsOnly
from lowvram.tasks import Problem

CPU = torch.device("cpu")
MARGIN = 0.1  # for devices for which the error of plans isn't known
# The second: the model lacks what a knob needs, or knobs conflict; the last: a value is out of range.
CANT_BE_HAD = (CantPlan, Incompatible, BadInput)
GENERIC = "generic"  # of conf/data_sheets: what plan.device=auto stands for if this machine has no card


@final
@dataclass(frozen=True)
class Plan:
    """conf/mode/plan.yaml: points are planned by a `Planner` and don't run."""


class PlanJob(NamedTuple):
    """A point to be planned by whichever process (helpers.py): its device is known, and needn't be there."""

    settings: Settings
    choices: Mapping[str, str]
    plan_device: PlanDevice

    @property
    def kind(self) -> str:
        """The same for points that share traces: all but their numbers of parts and samples."""
        groups = {name: value for name, value in self.settings.groups.items() if name != "accum"}
        return repr((groups, self.plan_device.num_ranks, self.plan_device.row))


@final
class Planner:
    """Plans points one after another; what several points share is computed once."""

    def __init__(self, cache: TraceCache | None = None, calibrations: Calibrations | None = None) -> None:
        self.cache, self.calibrations = cache, calibrations
        self.opened: dict[str, Data] = {}  # by the configuration of the data
        self.scalers: dict[tuple[str, Target], TraceScaler] = {}  # by the problem's description and the target
        self.models: dict[str, nn.Module] = {}  # on the meta device
        self.about: dict[str, Fields] = {}  # the fields about the models

    def fields(self, settings: Settings, choices: Mapping[str, str]) -> Fields:
        """The fields of the row of a point that is only planned, for the device `plan.device`."""
        try:
            job = self.job(settings, choices, plan_device_of(settings))
        except (BadInput, Incompatible) as error:
            return refused(error)
        return fields_of(job, self.plan_or_error(job))

    def job(self, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice) -> PlanJob:
        """The point as a process without its device plans it."""
        return PlanJob(settings, choices, replace(self.with_rates(plan_device, settings, choices), here=None))

    def plan_or_error(self, job: PlanJob) -> Fields | Exception:
        """What `planned` returns, or raises where there is no plan."""
        try:
            return self.planned(*job)
        except CANT_BE_HAD as error:
            return error

    def planned(self, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice) -> Fields:
        """The fields about the model and its plan; where the plan is to choose something, of what it has chosen.

        Raises:
            BadInput: a value out of range.
            Incompatible: the knobs conflict, with each other or with the device that the plan is for.
            CantPlan: the model can't be traced.
        """
        plan_device = replace(plan_device, link_of_plan=settings.plan.link_bytes_per_s)
        if choices.get("mode") == TEACH:
            raise CantPlan(f"plans are of training, and mode={TEACH} trains nothing")
        left = undecided(settings)
        if left is None:
            return self.planned_as_is(settings, choices, plan_device)
        budget = settings.vram_bytes or (plan_device.device.is_cuda and plan_device.device.memory_bytes)
        require_budget(left, budget)
        attempts: dict[tuple[int, ...], Attempt] = {}

        def attempt(numbers: tuple[int, ...]) -> Attempt:
            if numbers not in attempts:
                decided = decide(settings, left, numbers)
                fields = self.planned_as_is(decided, choices, plan_device)
                value = settings.groups[left.group].chosen_value(numbers)
                fields["plan"]["chosen"] = {left.group: {left.field: value}}
                stages = self.stages(decided, choices, plan_device.target)
                attempts[numbers] = Attempt(fields, [each.trace for each in stages])
            return attempts[numbers]

        return CHOOSERS[left.field](self.about_choice(settings, choices, plan_device, left), attempt)

    def about_choice(
        self, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice, left: LeftToPlan
    ) -> About:
        """What a choice needs to know of a point."""
        problem, knobs = self.problem(settings), named_knobs(settings, choices)
        passes = passes_of(knobs.values(), plan_device.row, settings.groups["accum"].parts)
        num_stages = 1 if passes is None else 1 + max(each.stage for order in passes for each in order)
        rates = plan_device.rates or DataSheet(plan_device.device)
        known = self.scaler(problem, plan_device.target).known_model()
        return About(settings.groups[left.group], known, block_names(problem, knobs), num_stages, rates)

    def planned_as_is(self, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice) -> Fields:
        """As `planned`, where nothing is left to choose."""
        target = plan_device.target
        stages, problem = self.stages(settings, choices, target), self.problem(settings)
        knobs, scaler = named_knobs(settings, choices), self.scaler(problem, target)
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in self.model(problem, knobs).modules())
        passes = passes_of(knobs.values(), target.row, settings.groups["accum"].parts)
        pipeline = None if passes is None else Pipeline([each.trace for each in stages], passes)
        is_expandable = settings.groups["allocator"].expandable_segments
        plan = needs(largest(stages).trace, plan_device, is_expandable, is_recurrent, pipeline, settings.vram_bytes)
        advice = advice_for(plan["by_kind"], settings, choices, target, scaler.lacking)
        grows = settings.groups["accum"].more_parts(settings.train.batch_size // target.num_data_ranks) is not None
        about = {"device": plan_device.name, "is_eager_equivalent": is_compiled(knobs.values()), "grows": grows}
        fit = fit_of(plan, settings, plan_device) | ({"loop": PLAIN} if target.zero_grad else {})
        fit |= self.cost(plan, settings, plan_device)
        return {
            **self.about_model(problem, knobs),
            "plan": {**about, **plan, "error": plan_device.device.error, **fit, "advice": advice},
        }

    def cost(self, plan: Fields, settings: Settings, plan_device: PlanDevice) -> Fields:
        """The field about what all updates cost, if the time of one and a price are known."""
        if plan["step_ms"] is None or settings.root.price_per_hour is None:
            return {}
        num_steps = with_steps(settings, self.data(settings)).train.steps
        return {"cost": settings.cost(num_steps * plan["step_ms"] / 1e3, plan_device.num_ranks), "num_steps": num_steps}

    def traced(self, settings: Settings, choices: Mapping[str, str], target: Target) -> ScaledTrace:
        """The trace of a point; of a pipeline, that of the stage that takes the most memory."""
        return largest(self.stages(settings, choices, target))

    def stages(self, settings: Settings, choices: Mapping[str, str], target: Target) -> list[ScaledTrace]:
        """The traces of a point: of a pipeline, that of each stage, in order; else one."""
        parts = settings.groups["accum"].parts
        check_batch_size(settings.train.batch_size, parts, target.num_data_ranks)
        num_rows = self.most_rows(settings, target.num_data_ranks * parts)
        knobs = without_parts(named_knobs(settings, choices))
        problem = self.problem(settings)
        return [self.scaler(problem, each).trace(knobs, parts, num_rows) for each in target.stages()]

    def with_rates(self, plan_device: PlanDevice, settings: Settings, choices: Mapping[str, str]) -> PlanDevice:
        """The device with its measured rates, if there are any on disk. Measures nothing."""
        if plan_device.here is None or self.calibrations is None:
            return plan_device
        name, _ = acting_allocator(settings, choices, plan_device.here)
        return replace(plan_device, rates=self.calibrations.known(plan_device.here, name))

    def problem(self, settings: Settings) -> Problem:
        """The problem of a point."""
        return settings.groups["task"].pose(settings.groups["model"], self.data(settings).spec)

    def data(self, settings: Settings) -> Data:
        """The data of a point; opened once for each configuration."""
        key = repr(([settings.groups[name] for name in ("data", "loader", "model")], settings.root.seed))
        if key not in self.opened:
            self.opened[key] = open_data(settings)
        return self.opened[key]

    def most_rows(self, settings: Settings, unit: int) -> int:
        """The most rows that a batch can have (with packed sequences fewer than samples), rounded up to a multiple of
        `unit`, of which the batch size is a multiple, too."""
        batch_size = settings.train.batch_size
        num_rows = settings.groups["loader"].most_rows(self.data(settings).train, batch_size)
        return min(batch_size, -(-num_rows // unit) * unit)

    def scaler(self, problem: Problem, target: Target) -> TraceScaler:
        key = (problem.description, target)
        if key not in self.scalers:
            self.scalers[key] = TraceScaler(problem, target, self.cache)
        return self.scalers[key]

    def about_model(self, problem: Problem, knobs: Mapping[str, Knob]) -> Fields:
        """The fields about the model, as the knobs build it and change what it computes."""
        key = repr((problem.description, list(knobs.values())))
        if key not in self.about:
            self.about[key] = about_model(problem, self.model(problem, knobs), list(knobs.values()))
        return self.about[key]

    def model(self, problem: Problem, knobs: Mapping[str, Knob]) -> nn.Module:
        """The model without its weights, as the knobs build it."""
        key = repr((problem.description, [knob for knob in knobs.values() if knob.stage is Stage.BUILD]))
        if key not in self.models:
            self.models[key] = skeleton(problem, knobs)
        return self.models[key]


def fields_of(job: PlanJob, outcome: Fields | Exception) -> Fields:
    """The fields of a row: a plan; or the reason why there is none, with advice for the case that memory runs out."""
    if isinstance(outcome, CantPlan):
        advice = advice_for(None, job.settings, job.choices, job.plan_device.target, lambda asked: {})
        return {"status": "error", "reason": str(outcome), "advice": advice}
    return refused(outcome) if isinstance(outcome, Exception) else {"status": "ok", **outcome}


def refused(error: Exception) -> Fields:
    """The fields of the row of a point that can't be had."""
    return {"status": "incompatible", "reason": str(error)}


def largest(stages: Sequence[ScaledTrace]) -> ScaledTrace:
    """The one that takes the most memory."""
    return max(stages, key=lambda each: each.trace.sums().peak_bytes)


def advice_for(
    by_kind: Mapping[str, float] | None,
    settings: Settings,
    choices: Mapping[str, str],
    target: Target,
    lacking: Callable[[frozenset[ModelFact]], Mapping[ModelFact, str]],
) -> str:
    """What to try if the point runs out of memory on `target`.

    Args:
        lacking: of the facts that it gets, those that the model lacks.
    """
    can_be = can_replace(settings, choices, target.absent(), target.num_data_ranks)

    def is_possible(group: str, option: str) -> bool:
        asked = model_facts([knob_of((group, option))])
        return can_be(group, option) and not (asked and lacking(asked))

    in_use = {group: settings.groups[group] for group in KNOB_GROUPS}
    return out_of_memory_advice(by_kind, in_use, is_possible, settings.vram_bytes)


def named_knobs(settings: Settings, choices: Mapping[str, str]) -> dict[str, Knob]:
    """The knobs by the names that messages use. Measuring the noise scale takes next to nothing: of it only the facts
    that it needs count. What skipping steps keeps is counted."""
    knobs: dict[str, Knob] = {f"{group}={choices[group]}": settings.groups[group] for group in KNOB_GROUPS}
    knobs |= {name: DeclarationsOnly(knob) for name, knob in noise_of(settings.train).knobs().items()}
    return knobs | dict(skips_of(settings.train).knobs())


def without_parts(knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    return {name: knob for name, knob in knobs.items() if knob.stage is not Stage.BATCH}


def plan_device_of(settings: Settings) -> PlanDevice:
    """The device that `plan.device` names, and the loop that `plan.loop` does."""
    return replace(named_device(settings), zero_grad=zero_grad_of(settings.plan.loop, settings.plan.zero_grad))


def named_device(settings: Settings) -> PlanDevice:
    """`sharding.ranks=auto` counts as `devices`; without it as one rank, as the number of devices isn't known."""
    num_ranks = wanted_ranks(settings.groups["sharding"], CPU, False, settings.root.devices)
    ranks = (num_ranks, row_of(settings, num_ranks))
    if settings.plan.device != "auto":
        here = CPU if settings.plan.device == CPU.type else None
        return PlanDevice(settings.plan.device, load_device(settings.plan.device), *ranks, here)
    if settings.root.device == "cpu":
        return PlanDevice("cpu", load_device("cpu"), *ranks, CPU)
    if not torch.cuda.is_available():
        return PlanDevice(GENERIC, load_device(GENERIC), *ranks)
    here = choose_device(settings.root.device)
    return PlanDevice(*device_here(here), *ranks, here)


def plan_device_here(settings: Settings, num_launched: int | None = None) -> PlanDevice:
    """The device of this machine on which a point runs.

    Args:
        num_launched: the number of ranks that torchrun has started; None: torchrun isn't used.

    Raises:
        BadInput: this machine has no such device.
    """
    device = choose_device(settings.root.device)
    num_ranks = num_launched
    if num_ranks is None:
        root = settings.root
        num_ranks = wanted_ranks(settings.groups["sharding"], device, root.names_card, root.devices)
    free_bytes, ranks = free_host_bytes(), (num_ranks, row_of(settings, num_ranks))
    if device.type == "cpu":
        spec = replace(load_device("cpu"), memory_bytes=free_bytes)
        return PlanDevice("cpu", spec, *ranks, device)
    return PlanDevice(*device_here(device), *ranks, device, host_bytes=free_bytes)


def device_here(device: torch.device) -> tuple[str, DeviceSpec]:
    """The name of a card of this machine, and its data sheet with the memory that its driver reports. If
    conf/data_sheets doesn't have it, the rates are unknown."""
    card, num_bytes = card_of(device), torch.cuda.get_device_properties(device).total_memory
    major, minor = card.capability
    unknown = DeviceSpec(names=[card.name], compute_capability=f"{major}.{minor}")
    spec = find_device(card.name) or unknown
    return card.name, replace(spec, memory_bytes=num_bytes, multiprocessors=card.num_multiprocessors)


def margin_of(plan: Fields, settings: Settings, plan_device: PlanDevice) -> float:
    """The margin, relative to the planned memory: `plan.margin` if set; else the sum of the margins of all lines, if
    those are known; else the 95th percentile of the error of plans for this device, or `MARGIN`."""
    if settings.plan.margin is not None:
        return settings.plan.margin
    if plan["margin_bytes"] is not None:
        return plan["margin_bytes"] / plan["least_vram_bytes"]
    return MARGIN if plan_device.device.error_p95 is None else plan_device.device.error_p95


def fit_of(plan: Fields, settings: Settings, plan_device: PlanDevice) -> Fields:
    """The fields that say whether the plan, with its margin, fits into `vram` (without it, the device's memory) and
    into the host's memory, if that is known. `fits` is None if the device's memory isn't known."""
    budget, host_budget = (
        settings.vram_bytes or plan_device.device.memory_bytes,
        settings.host_bytes or plan_device.host_bytes,
    )
    margin = margin_of(plan, settings, plan_device)
    share = 1 + margin
    fits = None if budget is None else plan["least_vram_bytes"] * share <= budget
    fits_host = host_budget is None or (plan["host_bytes"] or 0) * share <= host_budget
    budgets = {"budget_bytes": budget, "host_budget_bytes": host_budget, "margin": margin}
    return {**budgets, "fits": fits and fits_host}
