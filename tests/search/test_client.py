"""The time that a whole search may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.launch.spec import Point
from lowvram.results.row import Row, empty_row, merge
from lowvram.search.client import Searches, deadline, within
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
