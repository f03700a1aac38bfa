"""What a process may be asked besides running a point: each question is a function of its arguments that returns fields
of a row, and may tell events before. `Runner.ask` takes its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from omegaconf import OmegaConf

from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.settings import Settings, check_batch_size, settings
from lowvram.core.device import choose_device, visible_cards
from lowvram.core.fact import Fact
from lowvram.fidelity.reference import reference_of
from lowvram.loops.session import Events
from lowvram.loops.setup import acting_allocator, check_cards, row_of, wanted_ranks
from lowvram.loops.user_metrics import user_metrics
from lowvram.planning.cache import TraceCache
from lowvram.planning.helpers import Helpers, num_helpers
from lowvram.planning.time.calibration import Calibrations
from lowvram.planning.time.microbench import calibrate as measure_rates
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import (
    CANT_BE_HAD,
    PlanJob,
    Planner,
    fields_of,
    plan_device_here,
    plan_device_of,
    refused,
)
from lowvram.results.row import GIB, Status
from lowvram.search.exploring import MOST_PLANS
from lowvram.search.largest import Tried, largest_that_fits, tried
from lowvram.search.plan_cache import PlanCache
from lowvram.search.worker import Search
from lowvram.search.worker import search as find_candidates

Fields = dict[str, Any]
Point = Mapping[str, Any]  # see planning/client.py, `request_for`


class ToPlan(Events, Protocol):
    """Sends the events of plans."""

    @property
    def is_child(self) -> bool:
        """Whether this is a process of its own, which may be copied; False in the user's own (process=inline)."""
        ...


def check(events: Events, configs: list[dict[str, Any]], jobs: str = "1") -> Fields:
    """Build the objects of some configurations, and list the cards that their points may take, if these are to run side
    by side. Raises the first mistake.

    Args:
        jobs: what was typed: how many points run at the same time.
    """
    checked = list(map(settings, configs))
    for whole in checked:
        whole.check_paths()
        check_batch_size(whole.train.batch_size, whole.groups["accum"].parts, fewest_slices(whole))
        user_metrics(whole.eval.metrics or (), torch.device("cpu"))
    return {"status": "ok", "cards": [] if jobs == "1" else cards_side_by_side(checked, jobs)}


def fewest_slices(whole: Settings) -> int:
    """Into how many slices a logical batch is cut at least, as far as is known without the machine of the point. A
    search over meshes also tries those whose ranks all compute the same samples."""
    sharding = whole.groups["sharding"]
    if sharding.ranks != "auto":
        num_ranks = int(sharding.ranks)
    else:
        num_ranks = 1 if Fact.ONE_RANK in sharding.needs() else whole.root.devices or 1
    num_slices = row_of(whole, num_ranks).num_rows(num_ranks)  # which may be refused, in a search, too
    is_over_meshes = isinstance(whole.groups["mode"], Search) and (whole.root.devices or 1) > 1
    return 1 if is_over_meshes else num_slices


def cards_side_by_side(points: Sequence[Settings], jobs: str) -> list[str]:
    """The cards for points that have one each, as CUDA_VISIBLE_DEVICES names them; empty on a CPU.

    Raises:
        BadInput: points want different devices, or several cards each.
    """
    devices = list(dict.fromkeys(point.root.device for point in points))
    require(len(devices) == 1, "jobs", jobs, f"1 where points name different devices ({', '.join(devices)})")
    cards = visible_cards(devices[0])
    have_ranks = any(
        Fact.MANY_RANKS in point.groups["sharding"].needs() or (point.root.devices or 1) > 1 for point in points
    )
    allowed = "1 where points have several ranks (sharding, devices): side by side each has one card"
    require(not (cards and have_ranks), "jobs", jobs, allowed)
    return cards


def probe_cards(events: Events, config: dict[str, Any], jobs: str) -> Fields:
    """The cards that the probes of a search may take, if these are to run side by side, and how the cards differ.

    Args:
        jobs: what was typed.
    """
    cards = cards_side_by_side([settings(config)], jobs)
    kinds = {
        f"{card.name} of {card.total_memory / GIB:.1f} GiB"
        for card in map(torch.cuda.get_device_properties, range(len(cards)))
    }
    return {"status": "ok", "cards": cards, "kinds": sorted(kinds)}


def plan(events: ToPlan, points: list[Point]) -> Fields:
    """Plan points, several at once, and send each plan as soon as it is made."""
    planner = Planner(TraceCache(), Calibrations())
    checked = [whole_of(point) for point in points]
    with helpers_for(events, planner, [each for each in checked if isinstance(each, Settings)], len(points)) as helpers:
        jobs = [job_of(planner, *each) for each in zip(points, checked, strict=True)]
        left = dict[int, PlanJob]()
        for index, job in enumerate(jobs):
            if isinstance(job, PlanJob):
                left[index] = job
            else:
                events("planned", index=index, fields=job)
        indices = [*left]
        for place, outcome in helpers.answers([*left.values()]):
            events("planned", index=indices[place], fields=fields_of(left[indices[place]], outcome))
    return {"status": "ok"}


def helpers_for(events: ToPlan, planner: Planner, wholes: Sequence[Settings], num_plans: int) -> Helpers:
    """Copies of this process that make so many plans. What the points read is opened before: once, not by each copy."""
    num = num_helpers(num_plans) if events.is_child else 0
    for whole in wholes if num else ():
        with suppress(*CANT_BE_HAD):  # whoever plans the point tells it
            planner.data(whole)
    return Helpers(num, planner.plan_or_error)


def whole_of(point: Point) -> Settings | Fields:
    """The configuration of a point, built; or the fields of its row, if something in it can't be used."""
    try:
        whole = settings(point["config"])
        whole.check_paths()
    except BadInput as error:  # of this point alone
        return refused(error)
    return whole


def job_of(planner: Planner, point: Point, whole: Settings | Fields) -> PlanJob | Fields:
    """What is to be planned; or the fields of the point's row, if that is known already."""
    if not isinstance(whole, Settings):
        return whole
    launch = point["launch"]
    try:
        device = plan_device_here(whole, launch and launch["num_ranks"]) if point["is_real"] else plan_device_of(whole)
        return planner.job(whole, point["choices"], device)
    except (BadInput, Incompatible) as error:
        return refused(error)


def planned(planner: Planner, point: Point) -> Fields:
    """The fields of a plan in the row of one point."""
    job = job_of(planner, point, whole_of(point))
    return fields_of(job, planner.plan_or_error(job)) if isinstance(job, PlanJob) else job


def calibrate(events: Events, point: Point) -> Fields:
    """Measure the rates of the device that a point runs on, with its allocator, unless they are on disk already."""
    whole = settings(point["config"])
    device = choose_device(whole.root.device)
    name, allocator = acting_allocator(whole, point["choices"], device)
    allocator.set_malloc()
    Calibrations().get(device, name, measure_rates)
    return {"status": "ok"}


def search(events: ToPlan, point: Point, pinned: list[str]) -> Fields:
    """Find the candidates of a search; sends an event for each plan that was made."""
    whole, planner = settings(point["config"]), Planner(TraceCache(), Calibrations())
    alone = replace(whole, root=replace(whole.root, devices=None))  # the search itself spreads points
    with helpers_for(events, planner, [whole], MOST_PLANS) as helpers:
        plan_device = plan_device_here(alone) if point["is_real"] else plan_device_of(alone)
        cache = PlanCache(
            planner,
            whole,
            point["choices"],
            plan_device,
            lambda num_plans: events("searched", num_plans=num_plans),
            is_measured=point["is_real"],
            helpers=helpers,
        )
        try:
            events("found", **find_candidates(cache, pinned))
        except CantPlan as error:
            reason = f"{error}; a search needs plans: mode=measure runs a point without one"
            return {"status": "error", "reason": reason}
    return {"status": "ok"}


def solve(events: Events, point: Point, paths: list[str], start: int, unit: int) -> Fields:
    """Plan values until the largest with which the point fits is known; sends each plan with its value. If the first
    one is refused, that is no matter of its size, and ends it.

    Args:
        paths: the dotted keys that have the value.
        start: the first value.
        unit: what values are multiples of.
    """
    planner, refused = Planner(TraceCache(), Calibrations()), dict[str, Any]()

    def attempt(value: int) -> Tried | None:
        fields = planned(planner, {**point, "config": with_value(point["config"], paths, value)})
        if value == start and fields["status"] != Status.OK:
            refused.update({name: fields[name] for name in ("status", "reason")})
            return None
        found = tried(value, fields)
        events("planned", index=value, fields=fields)
        return found

    largest_that_fits(attempt, start, unit)
    return refused or {"status": "ok"}


def with_value(config: Mapping[str, Any], paths: Sequence[str], value: int) -> dict[str, Any]:
    """The configuration with a value under some dotted keys."""
    changed = OmegaConf.create(dict(config))
    for path in paths:
        OmegaConf.update(changed, path, value)
    found: Any = OmegaConf.to_container(changed)
    return found


def ranks(events: Events, config: dict[str, Any]) -> Fields:
    """How many ranks a point takes on this machine."""
    whole = settings(config)
    device = choose_device(whole.root.device)
    num_ranks = wanted_ranks(whole.groups["sharding"], device, whole.root.names_card, whole.root.devices)
    check_cards(num_ranks, device, whole.root.names_card)
    num_slices = row_of(whole, num_ranks).num_rows(num_ranks)
    check_batch_size(whole.train.batch_size, whole.groups["accum"].parts, num_slices)  # which limits their number
    return {"status": "ok", "ranks": num_ranks}


def reference(events: Events, config: dict[str, Any], choices: dict[str, str]) -> Fields:
    """The configuration and choices of what a point's fidelity is measured against."""
    return {"status": "ok", "reference": reference_of(config, choices)}


ASKS: Mapping[str, Callable[..., Fields]] = {
    asked.__name__: asked for asked in (check, probe_cards, plan, calibrate, search, solve, ranks, reference)
}
