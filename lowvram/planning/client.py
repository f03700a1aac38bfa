"""Asks a child process for plans. One child plans several points of a sweep, which is faster than one child for each.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from omegaconf import DictConfig

from lowvram.config.compose import MISTAKES, chosen, plain
from lowvram.config.settings import CHILDS_OWN, check_root, is_plan
from lowvram.launch.client import Event, Runner, is_lost
from lowvram.launch.spec import Point, with_chosen
from lowvram.launch.stop import StopConditions
from lowvram.launch.torchrun import Launch
from lowvram.results import row as rows
from lowvram.results.row import Row, Status, size_text
from lowvram.results.terminal import Progress

MODE = "plan"  # conf/mode/plan.yaml
FIRST_AHEAD, MOST_AHEAD = 8, 64  # points planned at once: few at first, so that a sweep starts soon
FAR_OFF = 1.25  # lowvram warns of points that need more than this many times their budget; plan.skip skips them
Planned = dict[str, Any]  # the fields of a row that the child plans
Request = dict[str, Any]


def request_for(config: Mapping[str, Any], choices: dict[str, str], launch: Launch | None = None) -> Request:
    """A point as it is sent to the child."""
    about = {"is_real": not is_plan(choices), "launch": launch and vars(launch)}
    return {"config": {key: config[key] for key in CHILDS_OWN}, "choices": choices, **about}


def request_of(config: DictConfig) -> Request:
    """The same, from a configuration that Hydra has composed."""
    return request_for(plain(config), chosen(config.hydra.runtime.choices))


class Upcoming(Protocol):
    """The points of a sweep; `lowvram.cli.sweep.SweepBatch` implements it."""

    def next(self, index: int, num: int) -> Iterator[tuple[int, DictConfig]]:
        """Up to `num` points from `index` on, each with its index. Raises Hydra's error for one that can't be
        composed."""
        ...

    def name(self, index: int) -> str: ...


@final
@dataclass
class Plans:
    """The plans of one call of the command line."""

    server: Runner
    progress: Progress
    stop_signals: Callable[[], int]
    coming: Upcoming | None = None  # the points of the sweep; None: a single point
    num_ahead: int = FIRST_AHEAD
    planned: dict[int, Planned] = field(default_factory=dict)  # by the point's index

    def row(self, point: Point) -> Row | None:
        """Plan a point and write its row. None: the user asked to stop before the plan was made."""
        planned = self.of(point)
        if planned is None:
            return None
        point = self.with_plan(point, planned.get("plan"))
        row = rows.merge(point.first_row(), {key: value for key, value in planned.items() if key != "advice"})
        if point.sweep or row["status"] != Status.INCOMPATIBLE:
            rows.write(point.folder, row)
        return row

    def with_plan(self, point: Point, plan: Mapping[str, Any] | None) -> Point:
        """The point with its plan and with what the plan has chosen, which is also shown."""
        name = f"{point.name}: " if point.sweep else ""
        for text in choice_texts(plan or {}, point.choices):
            self.progress.say(f"{name}{text}")
        return replace(point, plan=plan, config=with_chosen(point.config, plan))

    def skipped(self, point: Point) -> Row | None:
        """The row of a point that `plan.skip=true` skips, written unless the run that it would continue has left one.
        None: the point is to run."""
        if not point.config["plan"]["skip"] or not is_far_off(point.plan):
            return None
        assert point.plan is not None
        reason = f"planned to need {needed_text(point.plan)}, more than plan.skip=true lets run"
        row = rows.merge(point.first_row(), {"status": Status.SKIPPED.value, "reason": reason})
        if point.earlier is None:
            rows.write(point.folder, row)
        return row

    def of(self, point: Point) -> Planned | None:
        """Plan a point, together with the next ones of a sweep. None: the user asked to stop before the plan was
        made."""
        if point.index not in self.planned:
            asked = {point.index: request_for(point.config, point.choices, point.launch)}
            if self.coming is not None:
                asked |= self._next(self.coming, point.index)
            self.planned.clear()
            self.ask(asked)
            self._warn([index for index, point in asked.items() if point["is_real"] and index in self.planned])
        return self.planned.get(point.index)

    def _next(self, coming: Upcoming, index: int) -> dict[int, Request]:
        """Requests for the points after the one with `index`, up to one with an error, which is reported when its turn
        comes."""
        asked: dict[int, Request] = {}
        with suppress(*MISTAKES):
            for later, config in coming.next(index + 1, self.num_ahead - 1):
                check_root(config)
                asked[later] = request_of(config)
        self.num_ahead = min(2 * self.num_ahead, MOST_AHEAD)
        return asked

    def again(self, point: Point) -> Point:
        """The point, planned anew after its configuration has changed."""
        self.planned.pop(point.index, None)
        self.ask({point.index: request_for(point.config, point.choices, point.launch)})
        return self.with_plan(point, plan_for_row(self.planned.get(point.index)))

    def ask(self, points: Mapping[int, Request], is_again: bool = False) -> None:
        """Have the child plan these points, given by index, and keep the results in `self.planned`. If the child was
        killed or interrupted from outside, and this program wasn't, the rest is asked for once more."""
        indices = list(points)

        def on_event(event: Event) -> None:
            kind = event.pop("event")
            if kind == "planned":
                self.planned[indices[event["index"]]] = event["fields"]
                if len(points) > 1:
                    self.progress.update(event["index"] + 1, {})
            elif kind == "say":
                self.progress.say(event["text"])

        if len(points) > 1:
            self.progress.start("planning", len(points), "point")
        stop_conditions = StopConditions(time_for(points.values()), self.stop_signals)
        ending = self.server.ask("plan", {"points": list(points.values())}, stop_conditions, on_event, tries=1)
        self.progress.stop()
        left = {index: point for index, point in points.items() if index not in self.planned}
        if left and is_lost(ending) and not (is_again or self.stop_signals() or stop_conditions.is_timed_out):
            self.ask(left, is_again=True)
        elif not self.stop_signals():
            unknown = ending or {"status": "killed", "reason": "the process that plans was ended from outside"}
            self.planned = dict.fromkeys(indices, unknown) | self.planned

    def _warn(self, indices: Sequence[int]) -> None:
        """Announce the points that need far more than their budget."""
        plans = {index: self.planned[index].get("plan") for index in indices}
        texts = [
            f"{self.coming.name(index) if self.coming else 'it'} needs {needed_text(plan)}"
            for index, plan in plans.items()
            if plan and is_far_off(plan)
        ]
        if texts:
            self.progress.say(
                f"planned to need more than {FAR_OFF} times the memory allowed (plan.skip=true skips such points): "
                f"{'; '.join(texts)}"
            )


def time_for(points: Iterable[Request]) -> float | None:
    """The time limit in seconds: the sum of `timeout_s` of the points that will run; None for points only planned."""
    limits = [point["config"]["timeout_s"] for point in points if point["is_real"]]
    return sum(limits) if limits and None not in limits else None


def plan_for_row(planned: Planned | None) -> Mapping[str, Any] | None:
    """The field `plan` of the row of a point that also runs; None if the point is incompatible, as its run says so."""
    if planned is None or planned["status"] == Status.INCOMPATIBLE:
        return None
    if planned["status"] == Status.OK:
        return planned["plan"]
    return {key: planned[key] for key in ("reason", "advice") if key in planned}


def choice_texts(plan: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[str]:
    """For each group for which the plan has chosen values, a sentence that says which, as they are typed."""
    for group, values in plan.get("chosen", {}).items():
        words = " ".join(f"{group}.{name}={str(value).replace(' ', '')}" for name, value in values.items())
        if plan["least_vram_bytes"] * (1 + plan["margin"]) <= plan["budget_bytes"]:
            yield f"{group}={choices[group]}: the plan has chosen {words}"
        else:
            needed = f"{size_text(plan['least_vram_bytes'])} plus a margin of {plan['margin']:.0%}"
            budget = size_text(plan["budget_bytes"])
            yield f"{group}={choices[group]}: no choice fits {budget}, as the smallest needs {needed}: {words}"


def is_far_off(plan: Mapping[str, Any] | None) -> bool:
    """Whether a point can't fit its budget by a wide margin, and has no smaller parts to try."""
    if not plan or not plan.get("budget_bytes") or plan["grows"]:
        return False
    return plan["least_vram_bytes"] > FAR_OFF * plan["budget_bytes"]


def needed_text(plan: Mapping[str, Any]) -> str:
    return f"{size_text(plan['least_vram_bytes'])} of {size_text(plan['budget_bytes'])}"
