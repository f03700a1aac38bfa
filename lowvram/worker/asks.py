"""What a process may be asked besides running a point: each question is a function of its arguments that returns fields
of a row, and may tell events before. `Runner.ask` takes its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf

from lowvram.config.errors import BadInput, require
from lowvram.config.settings import Settings, check_batch_size, settings
from lowvram.core.device import choose_device, visible_cards
from lowvram.core.fact import Fact
from lowvram.fidelity.reference import reference_of
from lowvram.loops.session import Events
from lowvram.loops.setup import acting_allocator, check_cards, row_of, wanted_ranks
from lowvram.loops.user_metrics import user_metrics
from lowvram.planning.cache import TraceCache
from lowvram.planning.time.calibration import Calibrations
from lowvram.planning.time.microbench import calibrate as measure_rates
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import Planner, plan_device_here, plan_device_of
from lowvram.results.row import GIB, Status
from lowvram.search.largest import Tried, largest_that_fits, tried
from lowvram.search.worker import PlanCache, Search
from lowvram.search.worker import search as find_candidates

Fields = dict[str, Any]
Point = Mapping[str, Any]  # see planning/client.py, `request_for`


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


def plan(events: Events, points: list[Point]) -> Fields:
    """Plan point after point, and send each plan as soon as it is made."""
    planner = Planner(TraceCache(), Calibrations())
    for index, point in enumerate(points):
        events("planned", index=index, fields=planned(planner, point))
    return {"status": "ok"}


def planned(planner: Planner, point: Point) -> Fields:
    """The fields of a plan in the row of one point."""
    try:
        whole, launch = settings(point["config"]), point["launch"]
        whole.check_paths()
    except BadInput as error:  # of this point alone
        return {"status": Status.INCOMPATIBLE.value, "reason": str(error)}
    if not point["is_real"]:
        return planner.fields(whole, point["choices"])
    return planner.fields_here(whole, point["choices"], launch and launch["num_ranks"])


def calibrate(events: Events, point: Point) -> Fields:
    """Measure the rates of the device that a point runs on, with its allocator, unless they are on disk already."""
    whole = settings(point["config"])
    device = choose_device(whole.root.device)
    name, allocator = acting_allocator(whole, point["choices"], device)
    allocator.set_malloc()
    Calibrations().get(device, name, measure_rates)
    return {"status": "ok"}


def search(events: Events, point: Point, pinned: list[str]) -> Fields:
    """Find the candidates of a search; sends an event for each plan that was made."""
    whole, planner = settings(point["config"]), Planner(TraceCache(), Calibrations())
    alone = replace(whole, root=replace(whole.root, devices=None))  # the search itself spreads points
    plan_device = plan_device_here(alone) if point["is_real"] else plan_device_of(alone)
    cache = PlanCache(
        planner,
        whole,
        point["choices"],
        plan_device,
        lambda num_plans: events("searched", num_plans=num_plans),
        is_measured=point["is_real"],
    )
    try:
        events("found", **find_candidates(cache, pinned))
    except CantPlan as error:
        return {"status": "error", "reason": f"{error}; a search needs plans: mode=measure runs a point without one"}
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
