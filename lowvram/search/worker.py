"""mode=search: the fastest configurations that fit, by their plans. The parent measures the best of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.registry import knob_of, neutral_options
from lowvram.config.settings import KNOB_GROUPS, Settings, check_batch_size
from lowvram.core.knob import Exactness, Knob
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.skipping import skips_of
from lowvram.planning.estimate import Fields
from lowvram.planning.worker import CANT_BE_HAD
from lowvram.results.row import MIB, size_text
from lowvram.search.exploring import explore
from lowvram.search.meshes import ACCUM, SHARDING, meshes_of
from lowvram.search.plan_cache import PlanCache
from lowvram.search.ranking import ranked
from lowvram.search.space import (
    Estimate,
    Estimator,
    Option,
    Options,
    Plan,
    Space,
    space_of,
    useless,
    variants_of,
)

NUM_BARELY_FITTING = 2  # that are measured at most where nothing fits with its margin
NUM_NAMED = 5  # combinations that are too large and that the account names
Refused = dict[Option, str]


@final
@dataclass(frozen=True)
class Search:
    """conf/mode/search.yaml. `search` finds candidates in a child, and the parent runs the best ones as points."""


def search(cache: PlanCache, pinned: Collection[str]) -> Fields:
    """Plan combinations.

    Args:
        pinned: groups that the search leaves as they are, since the user named them.

    Returns:
        "ranking": the candidates, those that fit only without their margin first, then the others, the fastest first.
        "account": lines about all that were planned.
        "refusal": the message that nothing fits, for the case that none of the former runs; None if others fit.

    Raises:
        BadInput: the budget or the speed of the device is unknown.
        Incompatible: nothing fits, not even without its margin.
        CantPlan: the model can't be traced with the options in use.
    """
    unfit = spread(cache, pinned)
    groups = [name for name in cache.settings.search.groups or usual_groups() if name not in pinned]
    space, refused = offered(cache, groups) if cache.meshes is None else offered_over_meshes(cache, groups)
    refused |= unfit
    base = cache.plan(space, space.base)
    check(base)
    singles: dict[Option, Plan] = {}
    cache.prepare(space, (options for _, options in space.singles()))
    for option, options in space.singles():
        try:
            singles[option] = cache.plan(space, options)
        except CANT_BE_HAD as error:
            refused[option] = str(error)
    refused |= {option: why for option, plan in singles.items() if (why := useless(base, plan))}
    useful = space.without(refused)
    num_wanted = cache.settings.search.probes
    estimates = [*map(Estimator(base, singles).estimate, useful.combinations())]
    explore(cache, useful, estimates, num_wanted)
    first, refusal = measured_first(cache), None
    if not cache.fitting:
        refusal = f"{nothing_fits(list(cache.plans.values()))}{more_to_try(cache.settings, useful)}"
        if not first:
            raise Incompatible(refusal)
    lines = account(cache, space, estimates, refused, first)
    return {"ranking": [*first, *ranked(cache.fitting)], "account": lines, "refusal": refusal}


def spread(cache: PlanCache, pinned: Collection[str]) -> Refused:
    """With `devices`: have points be planned over that many, in each possible mesh. Returns why others aren't tried."""
    num_devices = cache.settings.root.devices
    if num_devices is None or num_devices == 1:
        return {}
    cache.meshes, refused = meshes_of(cache.settings, cache.choices, pinned)
    cache.plan_device = replace(cache.plan_device, num_ranks=num_devices)
    return refused


def usual_groups() -> list[str]:
    """The groups that a search tries by default: see `Knob.searched`."""
    return [group for group, option in neutral_options().items() if knob_of((group, option)).searched]


def offered_over_meshes(cache: PlanCache, groups: Sequence[str]) -> tuple[Space, Refused]:
    """The same over meshes. In use is the first that can be planned with the options in use."""
    assert cache.meshes is not None
    refused, last = Refused(), None
    for words in cache.meshes.knobs:
        try:
            space, others = offered(cache, [SHARDING, *(name for name in groups if name != SHARDING)], words)
            cache.plan(space, space.base)
        except CANT_BE_HAD as error:
            refused[SHARDING, words], last = str(error), error
        else:
            return space, {**others, **refused}
    raise last or BadInput("devices", cache.settings.root.devices, "a number for which sharding has a mesh")


def offered(cache: PlanCache, groups: Sequence[str], mesh: str | None = None) -> tuple[Space, Refused]:
    """The space of options to try, and the reasons why others aren't tried.

    Args:
        mesh: that counts as the one in use, if there are any.
    """
    knobs: dict[Option, Knob] = {}
    refused: Refused = {}
    for group in groups:
        if group == SHARDING and cache.meshes is not None:
            knobs |= {(group, name): knob for name, knob in cache.meshes.variants().items()}
            continue
        variants, impossible = variants_of(group, cache.choices[group], cache.settings.groups[group])
        refused |= {(group, name): why for name, why in impossible.items()}
        for name, knob in variants.items():
            why = None if name == cache.choices[group] else unwanted(cache, group, knob)
            if why:
                refused[group, name] = why
            else:
                knobs[group, name] = knob
    fixed = {f"{name}={cache.choices[name]}": cache.settings.groups[name] for name in KNOB_GROUPS if name not in groups}
    fixed |= {**noise_of(cache.settings.train).knobs(), **skips_of(cache.settings.train).knobs()}
    base = {group: cache.choices[group] for group in groups} | ({} if mesh is None else {SHARDING: mesh})
    accum = {name: knob for (group, name), knob in knobs.items() if group == ACCUM}
    clashing = [] if cache.meshes is None else cache.meshes.clashing(accum, cache.choices[ACCUM])
    space, conflicting = space_of(base, knobs, fixed, cache.plan_device.target.absent(), clashing)
    return space, refused | conflicting


def unwanted(cache: PlanCache, group: str, knob: Knob) -> str | None:
    """Why an option isn't tried, whatever the device; None: it is."""
    if knob.exactness is Exactness.LOSSY and not cache.settings.search.lossy:
        return "lossy: search.lossy=true tries it"
    if knob.chosen_by_user:
        return "it decides what is learnt: choose it yourself"
    if knob.left_to_plan() is not None:
        return "it takes several plans: choose it yourself"
    groups: dict[str, Any] = cache.settings.groups | {group: knob}
    parts, num_samples = (
        groups["accum"].parts,
        cache.settings.train.batch_size // cache.num_data_ranks,
    )
    if knob.more_parts(num_samples) is not None:
        return "it changes only after memory has run out"
    try:
        check_batch_size(cache.settings.train.batch_size, parts, cache.num_data_ranks)
    except BadInput as error:
        return str(error)
    return None


def check(base: Plan) -> None:
    """Raises BadInput if the plan in use has no budget or no time of a step."""
    if base["budget_bytes"] is None:
        raise BadInput("vram", None, "a budget, such as 8GiB: the memory of this device isn't known")
    if base["step_ms"] is None:
        allowed = (
            "a device whose YAML gives its rates, for several ranks that of their link, too (plan.link_bytes_per_s):"
            " without rates no time of a step can be predicted"
        )
        raise BadInput("plan.device", base["device"], allowed)


def measured_first(cache: PlanCache) -> list[Plan]:
    """Of the plans that fit only without their margin, those that are measured first: the fastest one, if it is faster
    than all that fit. If nothing fits: those of least memory."""
    fitting, barely_fitting = ranked(cache.fitting), ranked(cache.barely_fitting)
    if not fitting:
        return sorted(barely_fitting, key=lambda plan: plan["least_vram_bytes"])[:NUM_BARELY_FITTING]
    return [plan for plan in barely_fitting[:1] if plan["step_ms"] < fitting[0]["step_ms"]]


def account(
    cache: PlanCache, space: Space, estimates: Sequence[Estimate], refused: Refused, first: Sequence[Plan]
) -> list[str]:
    """Lines for the user: how many combinations were estimated and planned, and what was ruled out and why.

    Args:
        first: plans that fit only without their margin and that are measured first.
    """
    num_fitting, num_clashing = len(cache.fitting), space.size - space.num_compatible
    lines = [
        f"{space.size} combinations of {', '.join(space.names)}: {num_clashing} can't be had together, "
        f"{len(estimates)} were estimated, {len(cache.plans)} planned, {num_fitting} of these fit"
    ]
    if first:
        lines.append(f"fits only without its margin, so a probe decides: {', '.join(map(sized, first))}")
    larger = [plan for plan in cache.plans.values() if not plan["fits"] and plan not in first]
    if larger:
        texts = [sized(plan) for plan in sorted(larger, key=lambda plan: plan["step_ms"])[:NUM_NAMED]]
        lines.append(f"too large, the fastest first: {', '.join(texts)}{', …' if len(larger) > NUM_NAMED else ''}")
    by_reason: dict[str, list[str]] = {}
    for option, why in refused.items():
        by_reason.setdefault(why, []).append("=".join(option))
    return [*lines, *(f"ruled out: {', '.join(options)}: {why}" for why, options in by_reason.items())]


def nothing_fits(plans: Sequence[Plan]) -> str:
    """The message that nothing fits. It names the plan of least memory (if possible one that fits into the host's
    memory) and its options."""
    with_host = [plan for plan in plans if (plan["host_bytes"] or 0) <= (plan["host_budget_bytes"] or math.inf)]
    least = min(with_host or plans, key=lambda plan: plan["least_vram_bytes"])
    needed_bytes = least["least_vram_bytes"] * (1 + least["margin"])
    margin, options = f"a margin of {least['margin']:.0%} included", called(least["changes"])
    return (
        f"vram={size_text(least['budget_bytes'])}: nothing fits: the smallest plan found fits into "
        f"vram={math.ceil(needed_bytes / MIB)}MiB ({margin}): {options}"
    )


def more_to_try(settings: Settings, space: Space) -> str:
    """Settings of the search with which it may find configurations of less memory, for the message."""
    lossy = [] if settings.search.lossy else ["search.lossy=true"]
    named = [name for name in space.names if name != SHARDING or not settings.root.devices]
    groups = [] if "optimizer" in named else [f"search.groups=[{','.join([*named, 'optimizer'])}]"]
    return f" ({' or '.join([*groups, *lossy])} may find less)" if groups or lossy else ""


def sized(plan: Plan) -> str:
    return f"{called(plan['changes'])} ({size_text(plan['least_vram_bytes'])})"


def called(changes: Options) -> str:
    return " ".join("=".join(option) for option in changes.items()) or "the options in use"
