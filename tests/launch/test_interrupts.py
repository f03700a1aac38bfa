"""Ctrl-C and SIGTERM, at every moment: nothing is torn, nothing stays, and what was printed goes on with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import TINY, Outcome, Running, goes_on, history, wait_until

Call = Callable[..., Outcome]
Start = Callable[..., Running]
LONG = (*TINY, "train.steps=900", "name=slow")  # of 0.2 s each


def in_steps(call: Running, num_steps: int = 2) -> None:
    """Wait until some steps are made."""
    call.wait_for("started")
    (file,) = call.cwd.glob("**/metrics.jsonl")
    wait_until(lambda: len(file.read_text().splitlines()) >= num_steps, f"{num_steps} steps")


@pytest.mark.slow
def test_ctrl_c_in_the_steps_saves_and_the_printed_command_goes_on(start: Start, call: Call) -> None:
    """With workers, which get the signal too."""
    running = start(*LONG, "loader=workers")
    in_steps(running)
    running.signal_group()
    outcome = running.end()
    running.wait_until_gone(2)
    again = goes_on(outcome, call)
    assert again.folder == outcome.folder
    assert again.row["status"] == "ok"


@pytest.mark.slow
def test_ctrl_c_twice_kills(start: Start) -> None:
    """A point that doesn't answer."""
    call = start(*TINY, "name=hang")
    in_steps(call, 1)
    call.signal_group()
    with pytest.raises(subprocess.TimeoutExpired):
        call.process.wait(1)
    call.signal_group()
    outcome = call.end(5)
    assert outcome.code == 75
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == "killed by a second signal before it could save"
    call.wait_until_gone(1)


@pytest.mark.slow
def test_sigterm_of_the_program_saves(start: Start) -> None:
    """As schedulers of clusters send it: to one process, not to all."""
    call = start(*LONG)
    in_steps(call)
    call.process.terminate()
    outcome = call.end()
    assert outcome.code == 75, outcome.said()
    assert outcome.row["reason"] == f"stopped after step {len(history(outcome.folder))} of 900"
    assert outcome.command("continue with") == [f"resume={outcome.folder.relative_to(call.cwd)}"]
    call.wait_until_gone(1)


@pytest.mark.slow
def test_ctrl_c_before_the_steps(start: Start, tmp_path: Path) -> None:
    """While the program is imported, while the server imports torch, while the point is set up."""
    moments = ("starting", "importing", "set_up")
    for moment in moments:
        (tmp_path / moment).mkdir()
    calls = {moment: start(*TINY, "name=hang@0", cwd=tmp_path / moment) for moment in moments}
    wait_until(lambda: caught(calls["starting"].process.pid), "handlers of signals")
    calls["starting"].signal_group()
    calls["importing"].server()
    calls["importing"].signal_group()
    calls["set_up"].child()
    wait_until(lambda: caught(calls["set_up"].child()), "handlers of signals")
    calls["set_up"].signal_group()
    outcomes = {moment: call.end(20) for moment, call in calls.items()}
    for moment, outcome in outcomes.items():
        assert outcome.code == 75, outcome.said()
        assert "Traceback" not in outcome.out + outcome.err
        calls[moment].wait_until_gone(1)
    assert list((tmp_path / "starting").iterdir()) == []
    assert outcomes["starting"].err == "interrupted before anything began\n"
    assert outcomes["importing"].row["reason"] == "stopped before it could save"
    assert outcomes["set_up"].row["reason"] == "stopped in the set-up"


def caught(pid: int) -> bool:
    """Whether a process has handlers of its own, not Python's, which is for SIGINT alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:\t")[2].split()[0], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.slow
def test_a_time_limit_holds_though_the_process_that_starts_points_stands_still(start: Start) -> None:
    """As after `kill -STOP`. The next point of a sweep has a new one."""
    call = start("-m", *TINY, "seed=1,2", "name=1.slow", "train.steps=200", "timeout_s=4")
    call.wait_for("seed1: started")
    os.kill(call.server(), signal.SIGSTOP)
    outcome = call.end()
    assert outcome.code == 1, outcome.said()
    assert outcome.statuses == {"seed1": "timeout", "seed2": "ok"}
    assert outcome.rows["seed1"]["reason"] == "still running after timeout_s=4"
    call.wait_until_gone(1)


@pytest.mark.slow
def test_ctrl_c_holds_though_the_process_that_starts_points_stands_still(start: Start) -> None:
    call = start(*LONG)
    in_steps(call)
    os.kill(call.server(), signal.SIGSTOP)
    call.process.terminate()
    outcome = call.end()
    assert outcome.code == 75, outcome.said()
    assert outcome.row["reason"] == "stopped before it could save"
    call.wait_until_gone(1)


@pytest.mark.slow
def test_ctrl_c_in_a_sweep(start: Start, call: Call) -> None:
    """What is finished stays, what runs saves, what comes later isn't started; the printed command does the rest."""
    running = start("-m", *TINY, "seed=1,2,3", "name=2.slow", "train.steps=5")
    running.wait_for("seed2: started")
    running.signal_group()
    outcome = running.end()
    assert outcome.code == 75, outcome.said()
    assert outcome.statuses == {"seed1": "ok", "seed2": "interrupted"}
    first = outcome.folders[0] / "result.json"
    before = first.read_bytes(), first.stat().st_mtime_ns
    running.wait_until_gone(1)

    again = call(*outcome.command("to run what is missing"))
    assert again.code == 0, again.said()
    assert again.statuses == {"seed1": "ok", "seed2": "ok", "seed3": "ok"}
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before


def test_ctrl_c_before_the_first_point_of_a_sweep(start: Start) -> None:
    """While its points are checked: nothing is left."""
    call = start("-m", *TINY, "seed=1,2")
    call.server()
    call.signal_group()
    outcome = call.end(10)
    assert outcome.code == 75, outcome.said()
    assert outcome.out + outcome.err == ""
    assert list(call.cwd.iterdir()) == []
    call.wait_until_gone(1)
