"""jobs=N with mode=search: its probes side by side."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.launch.process_tree import children
from tests.calls import TINY, Outcome, Running, read_row, wait_until

Call = Callable[..., Outcome]
Start = Callable[..., Running]
SEARCH = ("mode=search", *TINY, "device=cpu", "vram=1GiB", "search.groups=[ckpt,accum]", "hydra.run.dir=s")


def probes(cwd: Path, search: str = "s") -> dict[str, str]:
    """The status of each probe that has a row."""
    return {path.parent.name: read_row(path.parent)["status"] for path in cwd.glob(f"{search}/*/result.json")}


def test_a_number_of_jobs_says_nothing_of_a_single_run(call: Call) -> None:
    told = "jobs=2: this is one point, which runs alone; -m runs several"
    assert told in call(*TINY, "mode=plan", "jobs=2").out
    assert "jobs=" not in call(*TINY, "mode=plan", "jobs=auto").out
    assert "jobs=" not in call(*TINY, "mode=plan").out


@pytest.mark.slow
def test_the_same_candidates_are_measured_as_one_after_another(train: Call) -> None:
    alone = train(*SEARCH, "measure.steps=2", timeout_s=200)
    beside = train(*SEARCH, "measure.steps=2", "jobs=2", "hydra.run.dir=b", timeout_s=200)
    assert alone.code == beside.code == 0, beside.said()
    found = probes(beside.cwd, "b")
    assert found == probes(alone.cwd)
    assert list(found.values()) == ["ok"] * 3
    assert beside.out.count(": started, ") == 3
    assert "jobs=" not in beside.out.split("the fastest: ")[1].partition("disturbed")[0]
    for folder in found:
        assert read_row(beside.cwd / "b" / folder)["disturbed"].startswith("jobs=2: other points ran on this CPU")


@pytest.mark.slow
def test_ctrl_c_ends_all_probes(start: Start, tmp_path: Path) -> None:
    running = begun(start, tmp_path)
    running.signal_group()
    outcome = running.end(120)
    assert outcome.code == 75, outcome.said()
    assert set(probes(tmp_path).values()) == {"interrupted"}
    running.wait_until_gone(20)


@pytest.mark.slow
def test_a_process_that_is_killed_loses_its_probe_alone(start: Start, tmp_path: Path) -> None:
    running = begun(start, tmp_path)
    followers = [pid for pid in children(running.process.pid) if children(pid)]
    os.kill(followers[0], signal.SIGKILL)
    wait_until(lambda: num_begun(tmp_path) == 3, "the next candidate", 120)
    running.signal_group()
    outcome = running.end(120)
    assert outcome.code == 75, outcome.said()
    assert ": killed: the process that followed it was killed" in outcome.out
    running.wait_until_gone(30)


def begun(start: Start, cwd: Path) -> Running:
    """A search whose first two probes make steps that take long."""
    running = start(*SEARCH, "name=s.slow", "measure.steps=900", "measure.max_seconds=900", "jobs=2")
    wait_until(lambda: num_begun(cwd) == 2, "two probes", 200)
    return running


def num_begun(cwd: Path) -> int:
    return len(list(cwd.glob("s/*/events.jsonl")))
