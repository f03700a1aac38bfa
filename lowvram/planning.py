"""Plans, in the parent: all those of a sweep come from one child, and none of them runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from lowvram.point import CHILDS_OWN, Point
from lowvram.process.client import Event, Server
from lowvram.process.orders import Orders
from lowvram.results import row as rows
from lowvram.results.row import Row, Status
from lowvram.results.terminal import Progress

MODE = "plan"  # conf/mode/plan.yaml
Planned = dict[str, Any]  # the part of a row that the child knows
Request = dict[str, Any]


def is_plan(choices: Mapping[str, str]) -> bool:
    """Whether a point is only planned."""
    return choices["mode"] == MODE


def request_for(config: Mapping[str, Any], choices: dict[str, str]) -> Request:
    """What the child is told of a point."""
    return {"config": {key: config[key] for key in CHILDS_OWN}, "choices": choices}


@final
@dataclass
class Plans:
    """The plans of one call of the command line."""

    server: Server
    progress: Progress
    stop_signals: Callable[[], int]
    expected: Mapping[int, Request] = field(default_factory=dict)  # of a sweep, by the place of the point
    told: dict[int, Planned] = field(default_factory=dict)

    def row(self, point: Point) -> Row | None:
        """Leave the row of a point in its folder. None: somebody asked to stop before it was known."""
        if point.index not in self.told:
            self.ask(self.expected or {point.index: request_for(point.config, point.choices)})
        if point.index not in self.told:
            return None
        row = rows.merge(point.first_row(), self.told[point.index])
        if point.sweep or row["status"] != Status.INCOMPATIBLE:
            rows.write(point.folder, row)
        return row

    def ask(self, points: Mapping[int, Request]) -> None:
        """Have all of them planned."""
        places, ending = list(points), Planned()

        def on_event(event: Event) -> None:
            kind = event.pop("event")
            if kind == "planned":
                self.told[places[event["index"]]] = event["fields"]
                self.progress.update(len(self.told), {})
            elif kind == "say":
                self.progress.say(event["text"])
            elif kind == "row":
                ending.update(event["fields"])

        if len(points) > 1:
            self.progress.start(MODE, len(points))
        self.server.run({"plan": list(points.values())}, on_event, Orders(None, self.stop_signals))
        self.progress.stop()
        if not self.stop_signals():
            unknown = ending or {"status": "killed", "reason": "the process that plans was ended from outside"}
            self.told = dict.fromkeys(places, unknown) | self.told
