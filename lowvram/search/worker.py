"""mode=search: the fastest configurations that fit, by their plans. The parent measures the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, final

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.registry import knob_of, neutral_options
from lowvram.config.settings import KNOB_GROUPS, Settings
from lowvram.core.knob import Exactness, Knob
from lowvram.loops.setup import check_batch_size
from lowvram.planning.estimate import Fields, PlanDevice
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import Planner
from lowvram.results.row import MIB, size_text
from lowvram.search.space import Estimate, Option, Options, Plan, Space, estimate, space_of, useless, variants_of

MOST_PLANS = 40  # of combinations, beside those of single options
MEMORY_SLACK = 1.1  # by how much the estimate of a combination's memory may be too large
TIME_SLACK = 1.05  # and that of its time too small
NUM_LEANEST = 8  # combinations that are planned before it is said that nothing fits
NUM_NAMED = 5  # of those that are too large
Refused = dict[Option, str]


@final
@dataclass(frozen=True)
class Search:
    """conf/mode/search.yaml. The parent has candidates found by `search`, and runs those as points."""


@final
@dataclass
class PlanCache:
    """The plans of combinations, each made once."""

    planner: Planner
    settings: Settings
    choices: Mapping[str, str]
    place: PlanDevice
    tell: Callable[[int], None]  # is told how many plans there are
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, space: Space, options: Options) -> Plan:
        """The plan of one of them, with what it changes of the options in use."""
        key = tuple(options.values())
        if key not in self.plans:
            knobs = {group: space.knobs[group, name] for group, name in options.items()}
            whole = replace(self.settings, groups=self.settings.groups | knobs)
            plan = self.planner.planned(whole, {**self.choices, **options}, self.place)["plan"]
            self.plans[key] = {**plan, "changes": space.changes(options)}
            self.tell(len(self.plans))
        return self.plans[key]

    @property
    def fitting(self) -> list[Plan]:
        return [plan for plan in self.plans.values() if plan["fits"]]


def search(cache: PlanCache, pinned: Iterable[str]) -> Fields:
    """Plan combinations; returns the candidates, the best first, and an account of all others, for the parent.

    Args:
        pinned: groups that stay as they are.

    Raises:
        BadInput: the budget or the speed of the device is unknown.
        Incompatible: nothing fits.
        CantPlan: the model can't be traced with the options in use.
    """
    space, refused = offered(
        cache, [name for name in cache.settings.search.groups or usual_groups() if name not in pinned]
    )
    base = cache.plan(space, space.base)
    check(base)
    singles: dict[Option, Plan] = {}
    for option, options in space.singles():
        try:
            singles[option] = cache.plan(space, options)
        except CantPlan as error:
            refused[option] = str(error)
    refused |= {option: why for option, plan in singles.items() if (why := useless(base, plan))}
    useful = space.without(refused)
    num_wanted = cache.settings.search.probes
    estimates = [estimate(options, base, singles) for options in useful.combinations()]
    explore(cache, useful, estimates, num_wanted)
    if not cache.fitting:
        raise Incompatible(f"{nothing_fits(list(cache.plans.values()))}{more_to_try(cache.settings, useful)}")
    return {"ranking": ranked(cache.fitting), "account": account(cache, space, estimates, refused)}


def usual_groups() -> list[str]:
    """Those whose neutral option says that a search tries the others."""
    return [group for group, option in neutral_options().items() if knob_of((group, option)).searched]


def offered(cache: PlanCache, groups: Sequence[str]) -> tuple[Space, Refused]:
    """The options that can be had, and why others are not tried."""
    knobs: dict[Option, Knob] = {}
    refused: Refused = {}
    for group in groups:
        variants, impossible = variants_of(group, cache.choices[group], cache.settings.groups[group])
        refused |= {(group, name): why for name, why in impossible.items()}
        for name, knob in variants.items():
            why = None if name == cache.choices[group] else unwanted(cache, group, knob)
            if why:
                refused[group, name] = why
            else:
                knobs[group, name] = knob
    fixed = {f"{name}={cache.choices[name]}": cache.settings.groups[name] for name in KNOB_GROUPS if name not in groups}
    base = {group: cache.choices[group] for group in groups}
    space, conflicting = space_of(base, knobs, fixed, cache.place.target.absent())
    return space, refused | conflicting


def unwanted(cache: PlanCache, group: str, knob: Knob) -> str | None:
    """Why an option is not tried, on whatever device."""
    if knob.exactness is Exactness.LOSSY and not cache.settings.search.lossy:
        return "lossy: search.lossy=true tries it"
    groups: dict[str, Any] = cache.settings.groups | {group: knob}
    parts, num_samples = groups["accum"].parts, cache.settings.train.batch_size // cache.place.num_ranks
    if knob.more_parts(num_samples) is not None:
        return "it changes only after memory has run out"
    try:
        check_batch_size(cache.settings.train.batch_size, parts, cache.place.num_ranks)
    except BadInput as error:
        return str(error)
    return None


def check(base: Plan) -> None:
    """Raises BadInput if the plan in use has no budget or no time of a step."""
    if base["budget_bytes"] is None:
        raise BadInput("vram", None, "a budget, such as 8GiB: the memory of this device isn't known")
    if base["step_ms"] is None:
        allowed = "a device whose YAML gives its rates, with one rank: without rates no time of a step can be predicted"
        raise BadInput("plan.device", base["device"], allowed)


def explore(cache: PlanCache, space: Space, estimates: Sequence[Estimate], num_wanted: int) -> None:
    """Plan combinations, those first that should be the fastest of what fits, until no better ones are to be expected.
    Where nothing fits, plan the leanest ones."""
    base = cache.plan(space, space.base)
    room_bytes = MEMORY_SLACK * base["budget_bytes"] / (1 + base["margin"])
    sizes, times = [1.0], [1.0]  # planned / estimated, so far
    num_tried = 0
    latest_ms = late_ms(cache.fitting, num_wanted)
    for combination in sorted(estimates, key=lambda one: (one.step_ms, one.num_changes)):
        step_ms = combination.step_ms * median(times)
        if step_ms > latest_ms or num_tried == MOST_PLANS:
            break
        is_pointless = adds_nothing(space.changes(combination.options), step_ms, cache.fitting)
        if combination.least_bytes * median(sizes) <= room_bytes and not is_pointless:
            num_tried += 1
            try:
                plan = cache.plan(space, combination.options)
            except CantPlan:
                continue
            sizes.append(plan["least_vram_bytes"] / combination.least_bytes)
            times.append(plan["step_ms"] / combination.step_ms)
            latest_ms = late_ms(cache.fitting, num_wanted)
    if not cache.fitting:
        for combination in sorted(estimates, key=lambda one: one.least_bytes)[:NUM_LEANEST]:
            with suppress(CantPlan):
                cache.plan(space, combination.options)


def late_ms(fitting: Sequence[Plan], num_wanted: int) -> float:
    """The time of a step above which an estimate can't be among the best `num_wanted`."""
    pointed, _ = with_and_without_point(fitting)
    return TIME_SLACK * pointed[num_wanted - 1]["step_ms"] if len(pointed) >= num_wanted else math.inf


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """The fastest first; last those that save memory which isn't needed."""
    pointed, pointless = with_and_without_point(plans)
    return [*pointed, *pointless]


def with_and_without_point(plans: Sequence[Plan]) -> tuple[list[Plan], list[Plan]]:
    """By time; apart those that only add to what fits as well without it, and is no slower."""
    ordered = sorted(plans, key=lambda plan: (plan["step_ms"], len(plan["changes"]), plan["least_vram_bytes"]))
    pointed: list[Plan] = []
    pointless: list[Plan] = []
    for plan in ordered:
        is_pointless = adds_nothing(plan["changes"], plan["step_ms"], pointed)
        (pointless if is_pointless else pointed).append(plan)
    return pointed, pointless


def adds_nothing(changes: Options, step_ms: float, fitting: Iterable[Plan]) -> bool:
    """Whether fewer of these changes fit as well, and are no slower."""
    return any(plan["changes"].items() < changes.items() and plan["step_ms"] <= step_ms for plan in fitting)


def account(cache: PlanCache, space: Space, estimates: Sequence[Estimate], refused: Refused) -> list[str]:
    """What was looked at, and what was ruled out and why, in lines for people."""
    num_fitting, num_clashing = len(cache.fitting), space.size - sum(1 for _ in space.combinations())
    lines = [
        f"{space.size} combinations of {', '.join(space.names)}: {num_clashing} can't be had together, "
        f"{len(estimates)} were estimated, {len(cache.plans)} planned, {num_fitting} of these fit"
    ]
    too_large = sorted((plan for plan in cache.plans.values() if not plan["fits"]), key=lambda plan: plan["step_ms"])
    if too_large:
        texts = [f"{called(plan['changes'])} ({size_text(plan['least_vram_bytes'])})" for plan in too_large[:NUM_NAMED]]
        lines.append(f"too large, the fastest first: {', '.join(texts)}{', …' if len(too_large) > NUM_NAMED else ''}")
    by_reason: dict[str, list[str]] = {}
    for option, why in refused.items():
        by_reason.setdefault(why, []).append("=".join(option))
    return [*lines, *(f"ruled out: {', '.join(options)}: {why}" for why, options in by_reason.items())]


def nothing_fits(plans: Sequence[Plan]) -> str:
    """The least that would, and with which options; of those that the host has room for, if there are any."""
    with_host = [plan for plan in plans if (plan["host_bytes"] or 0) <= (plan["host_budget_bytes"] or math.inf)]
    least = min(with_host or plans, key=lambda plan: plan["least_vram_bytes"])
    needed_bytes = least["least_vram_bytes"] * (1 + least["margin"])
    margin, options = f"a margin of {least['margin']:.0%} included", called(least["changes"])
    return (
        f"vram={size_text(least['budget_bytes'])}: nothing fits: the smallest plan found fits into "
        f"vram={math.ceil(needed_bytes / MIB)}MiB ({margin}): {options}"
    )


def more_to_try(settings: Settings, space: Space) -> str:
    """What a search could still do to find less."""
    lossy = [] if settings.search.lossy else ["search.lossy=true"]
    groups = [] if "optimizer" in space.names else [f"search.groups=[{','.join([*space.names, 'optimizer'])}]"]
    return f" ({' or '.join([*groups, *lossy])} may find less)" if groups or lossy else ""


def called(changes: Options) -> str:
    return " ".join("=".join(option) for option in changes.items()) or "the options in use"
