"""The time that a whole search may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.launch.spec import Point
from lowvram.results.row import Row, empty_row, merge
from lowvram.search.client import Searches, deadline
from lowvram.search.measuring import Measured, within
from tests.calls import TINY, Outcome


def point(folder: Path, timeout_s: float | None = None, max_seconds: float | None = None) -> Point:
    config = {"timeout_s": timeout_s, "search": {"max_seconds": max_seconds}}
    return Point("id", "name", 0, folder, config, {}, None, {})


@pytest.mark.slow
def test_no_candidate_is_measured_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()

    def run(_: Any, probe: Point) -> Row:
        limits.append(probe.config["timeout_s"])
        time.sleep(0.2)
        return merge(empty_row(), {"status": "error"})

    monkeypatch.setattr(Searches, "run", run)
    told: Any = SimpleNamespace(say=lambda _: None)
    searches = Searches(told, told, lambda: 0, lambda probe: probe)
    whole = point(tmp_path, max_seconds=0.5)
    probes = [replace(whole, folder=tmp_path / str(number)) for number in range(9)]
    measured = searches.measure(probes, 3, deadline(whole))
    assert len(measured) == 3
    assert sorted(limits, reverse=True) == limits
    assert 0 < limits[-1] <= limits[0] <= 0.5
    assert len(searches.measure(probes, 3, deadline(point(tmp_path)))) == 9


def test_a_probe_keeps_a_shorter_limit_of_its_own(tmp_path: Path) -> None:
    assert within(point(tmp_path, 5.0), 9.0).config["timeout_s"] == 5
    assert within(point(tmp_path, 5.0), 2.0).config["timeout_s"] == 2
    assert within(point(tmp_path), float("inf")).config["timeout_s"] is None


def test_a_search_that_is_over_before_it_has_measured(call: Callable[..., Outcome]) -> None:
    done = call(*TINY, "mode=search", "search.max_seconds=0.01", "hydra.run.dir=s")
    assert done.code == 1, done.said()
    assert "timeout: nothing was measured within search.max_seconds=0.01" in done.out


class ManyAtOnce:
    """Runs as many probes at once as it has devices; each ends when all that run have been looked at."""

    def __init__(self, num: int, statuses: Mapping[int, str]) -> None:
        self._num, self._statuses = num, statuses
        self.running, self.together = list[Point](), list[list[int]]()

    @property
    def num_idle(self) -> int:
        return self._num - len(self.running)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def give(self, work: Point) -> None:
        self.running.append(work)

    def ended(self) -> list[tuple[Point, Row]]:
        self.together.append([probe.index for probe in self.running])
        probe = self.running.pop()  # the one that began last is the first to end
        return [(probe, merge(empty_row(), {"index": probe.index, "status": self._statuses.get(probe.index, "ok")}))]


@pytest.mark.parametrize("statuses", [{}, {0: "oom"}, {1: "oom", 2: "error"}, dict.fromkeys(range(9), "oom")])
def test_side_by_side_the_same_candidates_run_as_one_after_another(tmp_path: Path, statuses: dict[int, str]) -> None:
    probes = [replace(point(tmp_path), index=number, folder=tmp_path / str(number)) for number in range(9)]
    found = list[list[int]]()
    for num in (1, 2, 4):
        measured, running = Measured(3, math.inf, lambda: 0, lambda _: None), ManyAtOnce(num, statuses)
        measured.measure(probes, running)
        found.append([row["index"] for row in measured.rows])
        assert max(map(len, running.together)) == min(num, 3)
    assert found[1:] == found[:1] * 2
