"""A resumed run that ends before it has saved a step leaves its folder as it was."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from lowvram.results import row as rows
from lowvram.results.files.lease import LEASE
from tests.calls import TINY, Outcome, Running, children, history, wait_until
from tests.tiers import first_of

Call = Callable[..., Outcome]
Start = Callable[..., Running]
RUN = "outputs/run"
CHANGED = (".lowvram", "native.log")  # by every program that runs here


def files(folder: Path) -> Mapping[str, bytes]:
    """All files of a run, but for those that say nothing of it."""
    paths = [path for path in folder.glob("**/*") if path.is_file() and path.name not in CHANGED]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def finished(call: Call, tmp_path: Path) -> Path:
    """A run of 3 steps."""
    assert call(*TINY, "snapshot.every_steps=2", f"hydra.run.dir={RUN}").code == 0
    return tmp_path / RUN


def with_status(folder: Path, status: str) -> None:
    """As if the run had ended so, after its last snapshot."""
    row = rows.read(folder)
    assert row is not None
    rows.write(folder, {**row, "status": status, "reason": "for a test"})


# How the run that goes on ends, before it has saved a step -> its status.
ENDS = {
    "raise@0": "error",
    "kill@0": "killed",
    "out_of_memory@0": "oom",
    "term@0": "interrupted",
    "raise@1": "error",
    "kill@2": "killed",
    "out_of_memory@1": "oom",
    "exit17@1": "error",
}


HALVES = [list(ENDS.items())[::2], list(ENDS.items())[1::2]]
CASES = list(itertools.product(["ok", "oom", "interrupted"], [1, 0]))


@pytest.mark.parametrize(("earlier", "half"), first_of(CASES))
def test_a_run_that_ends_before_it_has_saved_changes_nothing(
    call: Call, finished: Path, earlier: str, half: int
) -> None:
    with_status(finished, earlier)
    before = files(finished)
    for fault, status in HALVES[half]:
        if earlier == "interrupted" and status == "oom":
            continue  # a result: see the next test
        ended = call(f"resume={RUN}", "train.steps=9", "snapshot.every_steps=5", f"name={fault}")
        assert f": {status}: " in ended.out, ended.said()
        assert ended.code == rows.Status(status).exit_single
        assert f"{RUN}/result.json stays as it was ({earlier})" in ended.out
        assert files(finished) == before, fault
        if status in ("killed", "interrupted"):
            words = [f"resume={RUN}", "train.steps=9", "snapshot.every_steps=5", f"name={fault}"]
            assert ended.command("continue with") == words
    again = call(f"resume={RUN}", "train.steps=5", "name=null")
    assert again.code == 0, again.said()
    assert [line["step"] for line in history(finished) if "loss/train" in line] == [1, 2, 3, 4, 5]


def test_a_result_replaces_a_row_that_is_none(call: Call, finished: Path) -> None:
    with_status(finished, "interrupted")
    assert call(f"resume={RUN}", "train.steps=5", "name=out_of_memory@1").code == 1
    row = rows.read(finished)
    assert row is not None
    assert row["status"] == "oom"


def test_lines_of_later_steps_than_the_snapshot_stay_too(call: Call, finished: Path) -> None:
    """Its newest snapshot is damaged, so the run goes on from an earlier step."""
    newest = max(finished.glob("snapshots/step_*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    before = (finished / "metrics.jsonl").read_bytes()
    ended = call(f"resume={RUN}", "train.steps=9", "name=kill@2")
    assert "step_00000002" in ended.out
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_saved_step_replaces_the_row(call: Call, finished: Path) -> None:
    ended = call(f"resume={RUN}", "train.steps=9", "name=term@2")
    assert ended.code == 75, ended.said()
    assert "stays as it was" not in ended.out
    assert ended.row["reason"] == "stopped after step 5 of 9"
    assert ended.command("continue with") == [f"resume={RUN}"]
    assert call(*ended.command("continue with"), "name=null").row["config"]["train"]["steps"] == 9


def set_up(running: Running) -> int:
    """The pid of the point's process, once it is there: after the one that plans. It hangs in its set-up."""
    return wait_until(lambda: next(filter(is_of_point, children(running.server())), None), "the point's process")


def is_of_point(pid: int) -> bool:
    """Whether a process has the log of a point; it handles signals before that."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/fd/2").resolve().name == "native.log"
    return False


@pytest.mark.slow
def test_ctrl_c_in_the_set_up_of_a_finished_run_changes_nothing(start: Start, finished: Path) -> None:
    before = files(finished)
    running = start(f"resume={RUN}", "train.steps=9", "name=hang@0")
    set_up(running)
    running.signal_group()
    ended = running.end()
    assert ended.code == 75, ended.said()
    assert "interrupted: stopped in the set-up" in ended.out
    assert files(finished) == before
    assert ended.command("continue with") == [f"resume={RUN}", "train.steps=9", "name=hang@0"]


# Who gets which signal -> the exit code of the program.
SIGNALS: Mapping[str, tuple[Callable[[Running, int], None], int]] = {
    "the program is asked to end": (lambda running, _: running.process.terminate(), 75),
    "the program is killed": (lambda running, _: running.process.kill(), -signal.SIGKILL),
    "the point's process is killed": (lambda _, child: os.kill(child, signal.SIGKILL), 1),
    "the server is killed": (lambda running, _: os.kill(running.server(), signal.SIGKILL), 1),
}


@pytest.mark.slow
def test_no_signal_in_the_set_up_of_a_finished_run_changes_anything(
    start: Start, finished: Path, tmp_path: Path
) -> None:
    before = files(finished)
    calls: dict[str, Running] = {}
    for name in SIGNALS:
        shutil.copytree(finished, tmp_path / name / RUN)
        calls[name] = start(f"resume={RUN}", "train.steps=9", "name=hang@0", cwd=tmp_path / name)
    for name, (send, code) in SIGNALS.items():
        send(calls[name], set_up(calls[name]))
        assert calls[name].end().code == code, name
        calls[name].wait_until_gone()
        # Nobody is left who could put back what the last processes were to do, and what they said.
        is_killed = code == -signal.SIGKILL
        of_processes = {"spec.json", "events.jsonl", LEASE} if is_killed else set[str]()
        found = files(tmp_path / name / RUN)
        assert {path for path in before if found.get(path) != before[path]} <= of_processes, name
        assert found.keys() == before.keys() | ({LEASE} if is_killed else set()), name


@pytest.mark.slow
def test_the_last_run_is_one_whose_program_was_killed_after_it_had_saved(
    start: Start, call: Call, finished: Path
) -> None:
    """Its own process has saved a step then, and says so in the row."""
    assert "no unfinished run" in call("resume=last").sentence
    running = start(f"resume={RUN}", "train.steps=99", "snapshot.every_steps=1", "name=slow@1")
    wait_until(lambda: list(finished.glob("snapshots/step_00000005.*.pt")), "a snapshot")
    running.process.kill()
    running.wait_until_gone()
    assert rows.read(finished) == {**(rows.read(finished) or {}), "status": "interrupted"}

    stopped = call("resume=last", "train.steps=8", "name=term@0")
    assert stopped.row["status"] == "interrupted", stopped.said()
    again = call("resume=last", "train.steps=8", "name=null")
    assert again.code == 0, again.said()
    assert [line["step"] for line in history(finished) if "loss/train" in line] == list(range(1, 9))
    assert "no unfinished run" in call("resume=last").sentence


def test_a_lost_line_of_the_last_evaluation_is_told(call: Call, finished: Path) -> None:
    """No snapshot knows it, as it is made after the last one; the row does."""
    metrics = finished / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    told = call(f"resume={RUN}", "train.steps=4")
    assert told.code == 0, told.said()
    assert f"{RUN}/metrics.jsonl: the line of its last evaluation is missing: loss/eval=" in told.said()
    assert "missing" not in call(f"resume={RUN}", "train.steps=5").said()
