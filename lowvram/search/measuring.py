"""Measures the candidates of a search, one after another or side by side, until enough of them have fitted. Imports no
torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, final

from lowvram.launch.spec import Point
from lowvram.results import row as rows
from lowvram.results.row import Row, Status


class Probes(Protocol):
    """Runs points."""

    @property
    def num_idle(self) -> int:
        """How many more may begin now."""
        ...

    @property
    def num_running(self) -> int: ...

    def give(self, work: Point) -> None:
        """Begin a point."""
        ...

    def ended(self) -> Sequence[tuple[Point, Row]]:
        """Wait until one of those that run has ended; returns all that have, with their rows."""
        ...


@final
class OneByOne:
    """Runs one point after another in this program."""

    def __init__(self, run: Callable[[Point], Row]) -> None:
        self._run, self._given = run, list[Point]()

    @property
    def num_idle(self) -> int:
        return 1 - len(self._given)

    @property
    def num_running(self) -> int:
        return len(self._given)

    def give(self, work: Point) -> None:
        self._given.append(work)

    def ended(self) -> Sequence[tuple[Point, Row]]:
        point = self._given.pop()
        return [(point, self._run(point))]


@final
class Measured:
    """The rows of the candidates that have run.

    Args:
        num_wanted: how many are to fit; no more candidates begin than are needed for that if all that run fit, so that
            the same ones run side by side as one after another.
        ends: when the search's time is up, by time.monotonic().
        say: prints a line.
    """

    def __init__(
        self, num_wanted: int, ends: float, stop_signals: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._num_wanted, self._ends, self._stop_signals, self._say = num_wanted, ends, stop_signals, say
        self.rows: list[Row] = []

    def measure(self, probes: Iterable[Point], running: Probes) -> None:
        """Run candidates until enough of them have fitted, the search's time is up, or a stop is requested."""
        coming = iter(probes)
        while True:
            while running.num_idle and self._needs_more(running) and (probe := next(coming, None)) is not None:
                self._begin(probe, running)
            if not running.num_running:
                break
            for probe, row in running.ended():
                self._add(probe, row)
        self.rows.sort(key=lambda row: row["index"] or 0)

    def _needs_more(self, running: Probes) -> bool:
        num_fitting = sum(row["status"] == Status.OK for row in self.rows)
        is_over = self._stop_signals() or time.monotonic() >= self._ends
        return num_fitting + running.num_running < self._num_wanted and not is_over

    def _begin(self, probe: Point, running: Probes) -> None:
        earlier = rows.read(probe.folder)
        probe.folder.mkdir(parents=True, exist_ok=True)
        if earlier is not None and rows.is_final(earlier):
            self._add(probe, earlier)
        else:
            running.give(within(probe, self._ends - time.monotonic()))

    def _add(self, probe: Point, row: Row) -> None:
        self.rows.append(row)
        self._say(": ".join(filter(None, [probe.name, row["status"], row["reason"]])))


def within(probe: Point, left_s: float) -> Point:
    """The probe, with no more time than the search has left."""
    limit = probe.config["timeout_s"] or math.inf
    return probe if limit <= left_s else replace(probe, config={**probe.config, "timeout_s": max(left_s, 0.0)})
