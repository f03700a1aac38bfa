"""Plans, in the parent: those of the next points of a sweep come from one child, which makes them faster than one child
each would. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from omegaconf import DictConfig

from lowvram.config.compose import MISTAKES, chosen, plain
from lowvram.config.settings import CHILDS_OWN, check_root, is_plan
from lowvram.launch.client import Event, Server
from lowvram.launch.in_process import Inline
from lowvram.launch.point import Point
from lowvram.launch.stop import Orders
from lowvram.launch.torchrun import Launch, as_request
from lowvram.results import row as rows
from lowvram.results.row import Row, Status, size_text
from lowvram.results.terminal import Progress

MODE = "plan"  # conf/mode/plan.yaml
FIRST_AHEAD, MOST_AHEAD = 8, 64  # points that are planned at once: few at first, so that a sweep starts soon
FAR_OFF = 1.25  # what needs so many times its budget is told before it runs, and can be skipped
Planned = dict[str, Any]  # the part of a row that the child knows
Request = dict[str, Any]


def request_for(config: Mapping[str, Any], choices: dict[str, str], launch: Launch | None = None) -> Request:
    """What the child is told of a point."""
    about = {"is_real": not is_plan(choices), "launch": as_request(launch)}
    return {"config": {key: config[key] for key in CHILDS_OWN}, "choices": choices, **about}


def request_of(config: DictConfig) -> Request:
    """The same, of what Hydra has composed."""
    return request_for(plain(config), chosen(config.hydra.runtime.choices))


class Coming(Protocol):
    """The points of a sweep before their turn."""

    def next(self, index: int, num: int) -> Iterator[tuple[int, DictConfig]]:
        """Up to `num` points from `index` on, each with its index. Raises what Hydra can't compose."""
        ...

    def name(self, index: int) -> str: ...


@final
@dataclass
class Plans:
    """The plans of one call of the command line."""

    server: Server | Inline
    progress: Progress
    stop_signals: Callable[[], int]
    coming: Coming | None = None  # points of a sweep
    num_ahead: int = FIRST_AHEAD
    told: dict[int, Planned] = field(default_factory=dict)  # by the point's index

    def row(self, point: Point) -> Row | None:
        """Leave the row of a point that is only planned. None: somebody asked to stop before it was known."""
        planned = self.of(point)
        if planned is None:
            return None
        row = rows.merge(point.first_row(), {key: value for key, value in planned.items() if key != "advice"})
        if point.sweep or row["status"] != Status.INCOMPATIBLE:
            rows.write(point.folder, row)
        return row

    def skipped(self, point: Point) -> Row | None:
        """Leave the row of a point that is not worth running: `plan.skip` says so."""
        if not point.config["plan"]["skip"] or not is_far_off(point.plan):
            return None
        assert point.plan is not None
        reason = f"planned to need {needed_text(point.plan)}, more than plan.skip=true lets run"
        row = rows.merge(point.first_row(), {"status": Status.SKIPPED.value, "reason": reason})
        rows.write(point.folder, row)
        return row

    def of(self, point: Point) -> Planned | None:
        """What is planned of a point, with the next ones of a sweep. None: somebody asked to stop before."""
        if point.index not in self.told:
            asked = {point.index: request_for(point.config, point.choices, point.launch)}
            if self.coming is not None:
                asked |= self._next(self.coming, point.index)
            self.told.clear()
            self.ask(asked)
            self._warn([place for place, point in asked.items() if point["is_real"] and place in self.told])
        return self.told.get(point.index)

    def _next(self, coming: Coming, index: int) -> dict[int, Request]:
        """What to ask of the points after the one with `index`, up to one with a mistake: that is told at its turn."""
        asked: dict[int, Request] = {}
        with suppress(*MISTAKES):
            for later, config in coming.next(index + 1, self.num_ahead - 1):
                check_root(config)
                asked[later] = request_of(config)
        self.num_ahead = min(2 * self.num_ahead, MOST_AHEAD)
        return asked

    def again(self, point: Point) -> Mapping[str, Any] | None:
        """The plan of a point whose configuration isn't what it was when it was planned."""
        self.told.pop(point.index, None)
        self.ask({point.index: request_for(point.config, point.choices, point.launch)})
        return beside(self.told.get(point.index))

    def ask(self, points: Mapping[int, Request], is_again: bool = False) -> None:
        """Have all of them planned; once more if somebody has ended the process that plans."""
        places, ending = list(points), Planned()

        def on_event(event: Event) -> None:
            kind = event.pop("event")
            if kind == "planned":
                self.told[places[event["index"]]] = event["fields"]
                if len(points) > 1:
                    self.progress.update(event["index"] + 1, {})
            elif kind == "say":
                self.progress.say(event["text"])
            elif kind == "row":
                ending.update(event["fields"])

        if len(points) > 1:
            self.progress.start("planning", len(points), "point")
        orders = Orders(time_for(points.values()), self.stop_signals)
        self.server.run({"plan": list(points.values())}, on_event, orders)
        self.progress.stop()
        left = {place: point for place, point in points.items() if place not in self.told}
        if left and not (ending or is_again or self.stop_signals() or orders.is_timed_out):
            self.ask(left, is_again=True)
        elif not self.stop_signals():
            unknown = ending or {"status": "killed", "reason": "the process that plans was ended from outside"}
            self.told = dict.fromkeys(places, unknown) | self.told

    def _warn(self, places: Sequence[int]) -> None:
        """Of points that are to run and can't fit by far."""
        plans = {place: self.told[place].get("plan") for place in places}
        texts = [
            f"{self.coming.name(place) if self.coming else 'it'} needs {needed_text(plan)}"
            for place, plan in plans.items()
            if plan and is_far_off(plan)
        ]
        if texts:
            self.progress.say(f"can't fit by far, as planned (plan.skip=true skips it): {'; '.join(texts)}")


def time_for(points: Iterable[Request]) -> float | None:
    """Planning takes no longer than running may; what is only planned takes as long as it likes."""
    limits = [point["config"]["timeout_s"] for point in points if point["is_real"]]
    return sum(limits) if limits and None not in limits else None


def beside(planned: Planned | None) -> Mapping[str, Any] | None:
    """A plan as the row of a point holds it that runs as well. What can't run is told by the point itself."""
    if planned is None or planned["status"] == Status.INCOMPATIBLE:
        return None
    if planned["status"] == Status.OK:
        return planned["plan"]
    return {key: planned[key] for key in ("reason", "advice") if key in planned}


def is_far_off(plan: Mapping[str, Any] | None) -> bool:
    """Whether a point can't fit its budget by a wide margin, and has no smaller parts to try."""
    if not plan or not plan.get("budget_bytes") or plan["grows"]:
        return False
    return plan["least_vram_bytes"] > FAR_OFF * plan["budget_bytes"]


def needed_text(plan: Mapping[str, Any]) -> str:
    return f"{size_text(plan['least_vram_bytes'])} of {size_text(plan['budget_bytes'])}"
