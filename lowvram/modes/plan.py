"""mode=plan: what points would hold, before they run. Many of them in one process, which computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lowvram.config import BadInput, Incompatible
from lowvram.core.device import Card, card_of, choose_device
from lowvram.core.knob import Kind, Knob, Stage
from lowvram.data.spec import DataSpec
from lowvram.job import can_replace, check_batch_size, open_data
from lowvram.plan.devices import DeviceSpec, find_device, load_device
from lowvram.plan.events import Phase, Trace
from lowvram.plan.hidden import Line, hidden_lines
from lowvram.plan.paper import CantPlan
from lowvram.plan.replay import Event, Replay, least_limit_bytes, replay
from lowvram.plan.repricing import Pricer
from lowvram.plan.store import Store
from lowvram.plan.target import Target
from lowvram.plan.timing import SOURCE, step_time
from lowvram.plan.tracing import is_equivalent
from lowvram.results.advice import out_of_memory_advice
from lowvram.settings import KNOB_GROUPS, Settings
from lowvram.tasks import Problem

GENERIC = "generic"  # what plans are for where there is no card
NUM_LARGEST = 10  # tensors that a plan names
Fields = dict[str, Any]


@final
@dataclass(frozen=True)
class Plan:
    """conf/mode/plan.yaml. The parent has plans made by a `Planner`: no point runs."""


@final
class Planner:
    """Plans points one after another; what they share is done once."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store
        self.specs: dict[str, DataSpec] = {}  # by the configuration of the data
        self.pricers: dict[tuple[str, Target], Pricer] = {}
        self.models: dict[str, nn.Module] = {}  # on the meta device

    def fields(self, settings: Settings, choices: Mapping[str, str]) -> Fields:
        """What a plan says in the row of a point."""
        try:
            return {"status": "ok", **self.planned(settings, choices)}
        except (BadInput, Incompatible) as error:
            return {"status": "incompatible", "reason": str(error)}
        except CantPlan as error:
            return {"status": "error", "reason": str(error)}

    def planned(self, settings: Settings, choices: Mapping[str, str]) -> Fields:
        """The model and its plan.

        Raises:
            BadInput: a value that no point can have.
            Incompatible: the knobs conflict, with each other or with the device that the plan is for.
            CantPlan: the model can't be traced.
        """
        name, device = device_of(settings)
        target = Target(as_card(name, device), ranks_of(settings))
        parts = settings.groups["accum"].parts
        check_batch_size(settings.train.batch_size, parts, target.num_ranks)
        knobs = {f"{group}={choices[group]}": settings.groups[group] for group in KNOB_GROUPS}
        problem = self.problem(settings)
        priced = self.pricer(problem, target).price(without_parts(knobs), parts, settings.train.batch_size)
        about = self.about_model(problem, list(knobs.values()))
        is_expandable = choices["allocator"] == "expandable"
        told = needs(priced.trace, device, target, is_expandable)
        about_plan = {"device": name, "is_eager_equivalent": is_equivalent(knobs)}
        plan = {**about_plan, **told, **verdict(told, settings, device)}
        is_possible = can_replace(settings, choices, target.absent(), target.num_ranks)
        advice = out_of_memory_advice(plan["by_kind"], choices, is_possible) if plan["fits"] is False else None
        return {**about, "plan": {**plan, "advice": advice}}

    def problem(self, settings: Settings) -> Problem:
        """The problem of a point; its data are opened once."""
        key = repr((settings.groups["data"], settings.groups["model"], settings.root.seed))
        if key not in self.specs:
            self.specs[key] = open_data(settings).spec
        return settings.groups["task"].pose(settings.groups["model"], self.specs[key])

    def pricer(self, problem: Problem, target: Target) -> Pricer:
        key = (description(problem), target)
        if key not in self.pricers:
            self.pricers[key] = Pricer(problem, target, self.store)
        return self.pricers[key]

    def about_model(self, problem: Problem, knobs: Iterable[Knob]) -> Fields:
        """What a row says of the model, and of what the knobs do to it."""
        key = description(problem)
        if key not in self.models:
            with torch.device("meta"):
                self.models[key] = problem.make_model()
        model = self.models[key]
        counted = Counter(type(block).__name__ for block in problem.blocks(model))
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        return {
            "model": {
                "parameters": sum(size for size, _ in sizes),
                "trainable": sum(size for size, is_trainable in sizes if is_trainable),
                "blocks": ", ".join(f"{count} {name}" for name, count in counted.items()),
            },
            "semantics_changed": "; ".join(filter(None, (knob.caveat(model) for knob in knobs))) or None,
        }


def description(problem: Problem) -> str:
    return repr((type(problem).__qualname__, problem.model, problem.spec))


def without_parts(knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    return {name: knob for name, knob in knobs.items() if knob.stage is not Stage.BATCH}


def device_of(settings: Settings) -> tuple[str, DeviceSpec]:
    """The device that a plan is for, and what it is called."""
    if settings.plan.device != "auto":
        return settings.plan.device, load_device(settings.plan.device)
    if settings.root.device == "cpu":
        return "cpu", load_device("cpu")
    if not torch.cuda.is_available():
        return GENERIC, load_device(GENERIC)
    here = choose_device(settings.root.device)
    card, num_bytes = card_of(here), torch.cuda.get_device_properties(here).total_memory
    major, minor = card.capability
    unknown = DeviceSpec(names=[card.name], compute_capability=f"{major}.{minor}", memory_bytes=num_bytes)
    return card.name, find_device(card.name) or unknown


def as_card(name: str, device: DeviceSpec) -> Card | None:
    return None if device.capability is None else Card(name, device.capability)


def ranks_of(settings: Settings) -> int:
    """How many ranks a point has; `auto` is one, as nobody knows how many devices there will be."""
    sharding = settings.groups["sharding"]
    return 1 if sharding.ranks == "auto" else int(sharding.ranks)


def needs(trace: Trace, device: DeviceSpec, target: Target, is_expandable: bool) -> Fields:
    """The part of a plan that depends on no budget. On a CPU it is that of a step whose optimizer has its state, as the
    ledger measures it; on a card that of the whole run, as its allocator does."""
    sums = trace.sums(is_steady=not device.is_cuda)
    lines = hidden_lines(device, torch.__version__, target.num_ranks)
    largest = trace.largest(NUM_LARGEST, is_steady=not device.is_cuda)
    return {
        **(on_card(trace, lines, is_expandable) if device.is_cuda else on_cpu(trace, lines)),
        "host_bytes": sums.host_bytes or None,
        "by_kind": named(sums.by_kind),
        "by_kind_max": named(sums.by_kind_max),
        "by_phase": named(sums.by_phase),
        "largest": [{"name": one.maker, "kind": one.kind.value, "bytes": one.num_bytes} for one in largest],
        "lines": [{"name": line.name, "bytes": line.num_bytes, "source": line.source} for line in lines],
        **times(trace, device, target),
        "error": None,
    }


def times(trace: Trace, device: DeviceSpec, target: Target) -> Fields:
    """Null where the device's rates are not known, and for several ranks: nothing is known of the way between them."""
    found = step_time(trace.work, device) if target.num_ranks == 1 else None
    if found is None:
        return {"step_ms": None, "step_ms_source": None, "step_ms_of": None}
    return {"step_ms": found.step_ms, "step_ms_source": SOURCE, "step_ms_of": found.by_name()}


def on_cpu(trace: Trace, lines: list[Line]) -> Fields:
    """A CPU is its own host, and its process holds what tensors hold at any time in the whole run, and more."""
    outside = sum(line.num_bytes or 0 for line in lines)
    return {
        "allocated_bytes": trace.sums(is_steady=True).peak_bytes,
        "reserved_bytes": None,
        "least_vram_bytes": trace.sums().with_host_bytes + outside,
    }


def on_card(trace: Trace, lines: list[Line], is_expandable: bool) -> Fields:
    """As the caching allocator plays it."""
    events = [*workspaces(lines), *(Event(*request) for request in requests(trace))]
    played: Replay = replay(events, expandable=is_expandable)
    outside = sum(line.num_bytes or 0 for line in lines if not line.is_in_allocator)
    return {
        "allocated_bytes": played.allocated_peak_bytes,
        "reserved_bytes": played.reserved_peak_bytes,
        "least_vram_bytes": least_limit_bytes(events, expandable=is_expandable) + outside,
    }


def workspaces(lines: list[Line]) -> list[Event]:
    """What libraries take from the allocator and keep."""
    sizes = [line.num_bytes for line in lines if line.is_in_allocator and line.num_bytes]
    return [Event(-1 - number, size) for number, size in enumerate(sizes)]


def requests(trace: Trace) -> Iterable[tuple[int, int]]:
    """Deaths as the replay tells them: negative."""
    return ((storage, num_bytes or -1) for storage, num_bytes in trace.requests())


def verdict(told: Fields, settings: Settings, device: DeviceSpec) -> Fields:
    """Whether it fits, with a margin, into `vram` or else into all that the device has; null where neither is known."""
    budget = settings.vram_bytes or device.memory_bytes
    needed = told["least_vram_bytes"] * (1 + settings.plan.margin)
    fits = None if budget is None else needed <= budget
    return {"budget_bytes": budget, "margin": settings.plan.margin, "fits": fits}


def named(sizes: Mapping[Kind, int] | Mapping[Phase, int]) -> dict[str, int]:
    return {key.value: num_bytes for key, num_bytes in sizes.items()}
