"""`python -m lowvram.worker FOLDER`: a run that nobody follows writes the same files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.settings import CHILDS_OWN
from lowvram.launch import torchrun
from lowvram.launch.events import FILE_NAME
from lowvram.launch.spec import PointSpec
from lowvram.launch.supervisor import Outlets
from lowvram.runs.row_so_far import RowSoFar
from lowvram.worker import main as worker
from lowvram.worker.__main__ import main
from tests.calls import ROOT, TINY, Outcome, history, read_row

Call = Callable[..., Outcome]
LEFT = ("result.json", "metrics.jsonl", "events.jsonl", "memory_over_step.csv", "model", "snapshots")


def started(folder: Path, **environment: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in environment.items()}
    words = [sys.executable, "-m", "lowvram.worker", str(folder)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path) -> tuple[int, str, str]:
    process = started(folder)
    said, complained = process.communicate(timeout=120)
    return process.returncode, said, complained


def prepared(call: Call, *words: str) -> Outcome:
    """A run of which nothing is left but what determines it."""
    outcome = call(*TINY, *words)
    assert outcome.code == 0, outcome.said()
    for name in LEFT:
        path = outcome.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return outcome


def test_the_same_files_are_written(call: Call) -> None:
    outcome = call(*TINY, "train.steps=3")
    wanted, lines = outcome.row, history(outcome.folder)
    for name in LEFT:
        path = outcome.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    code, said, complained = run(outcome.folder)
    assert (code, complained) == (0, "")
    assert said.startswith("data: synthetic tokens")
    assert said.endswith(": ok\n")
    row = read_row(outcome.folder)
    assert row["model"] == wanted["model"]
    assert row["loss"] == wanted["loss"]
    assert {key for key, value in row.items() if value} == {key for key, value in wanted.items() if value}
    assert history(outcome.folder) == lines
    code, said, _ = run(outcome.folder)
    assert code == 0
    assert said.endswith(": has its result already: ok\n")


@pytest.mark.slow
def test_one_that_was_interrupted_goes_on(call: Call) -> None:
    outcome = prepared(call, "train.steps=900", "train.log_every=1", "plan.skip=true")
    process = started(outcome.folder)
    while not (outcome.folder / "metrics.jsonl").exists() or len(history(outcome.folder)) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    row = read_row(outcome.folder)
    assert row["status"] == "interrupted"
    num_steps = len(history(outcome.folder))
    assert row["reason"] == f"stopped after step {num_steps} of 900"
    code, said, complained = run(outcome.folder)
    assert (code, complained) == (0, ""), said
    trained = [line["step"] for line in history(outcome.folder) if "loss/train" in line]
    assert trained == list(range(1, 901))


@pytest.mark.slow
def test_several_ranks_are_processes_with_torchrun_s_variables(call: Call) -> None:
    outcome = call(*TINY, "train.steps=3", "sharding=ddp", "sharding.ranks=2", "device=cpu")
    wanted, lines = outcome.row, history(outcome.folder)
    for name in LEFT:
        path = outcome.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    words += ["-m", "lowvram.worker", str(outcome.folder)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    row = read_row(outcome.folder)
    assert (row["status"], row["loss"]) == ("ok", wanted["loss"])
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
    assert history(outcome.folder) == lines


@pytest.mark.slow  # tests/worker/test_rendezvous.py asks without processes
def test_one_process_is_too_few_for_two_ranks(call: Call) -> None:
    outcome = prepared(call, "train.steps=1", "sharding=ddp", "sharding.ranks=2", "device=cpu")
    code, said, _ = run(outcome.folder)
    assert code == 3
    assert said.startswith("sharding.ranks='2': must be 1, the number of processes that were started for it")
    assert said.count("\n") == 1
    assert (outcome.folder / FILE_NAME).exists()
    assert not (outcome.folder / "result.json").exists()  # so that another start may run it


def test_no_rank_touches_a_folder_that_has_its_result(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = call(*TINY, "train.steps=1").folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for name, value in zip(torchrun.WORDS, ("1", "2", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert main([str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_nobody_listens_to_it(tmp_path: Path) -> None:
    """So its metrics are kept for the loggers of whoever goes on with it, also if what it prints goes into a file."""
    with (tmp_path / "events").open("wb") as file:
        outlets = Outlets(file.fileno(), file.fileno())
        assert [worker.Events(outlets, 0, is_alone)("progress") for is_alone in (False, True)] == [True, False]


def test_lines_that_a_full_disk_has_no_room_for_are_dropped() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        worker.SpokenStream(fd).write("a line\n")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("measure", "about", "fields", "is_written"),
    [
        ({"fidelity": False, "reruns": 2}, {}, {}, True),
        ({"fidelity": True, "reruns": 2}, {}, {}, False),
        ({"fidelity": False, "reruns": 2}, {}, {"disturbed": "by another process"}, False),
        ({"fidelity": False, "reruns": 0}, {}, {"disturbed": "by another process"}, True),
        ({"fidelity": False, "reruns": 2}, {"reruns": [{}]}, {}, False),
    ],
)
def test_a_row_to_which_the_program_adds_is_the_program_s(
    tmp_path: Path, measure: dict[str, Any], about: dict[str, Any], fields: dict[str, Any], is_written: bool
) -> None:
    """If it dies meanwhile, nothing says that the point is finished. Alone the process has nobody to wait for."""
    config = {"measure": measure, "accum": {"parts": 1}, "vram": None}
    for is_alone in (False, True):
        folder = tmp_path / str(is_alone)
        folder.mkdir()
        found = RowSoFar(PointSpec("0" * 16, "n", 0, folder, config, {"mode": "measure"}, **about))
        found.on_event("row", {"rank": 0, "fields": {"status": "ok", **fields}})
        worker.write_row(found, is_alone)
        assert (folder / "result.json").exists() == (is_written or is_alone)


def test_a_row_that_can_t_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody follows the run who could say so."""

    def refuse(so_far: RowSoFar, is_alone: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "result.json"))

    monkeypatch.setattr(worker, "write_row", refuse)
    monkeypatch.setattr(worker, "speak", lambda *_, **__: None)
    monkeypatch.setattr(worker.ChildStop, "listen", lambda _: None)
    monkeypatch.setattr(worker, "work", lambda _, events, *__: known(events, tmp_path))
    with (tmp_path / "events").open("wb") as file:
        assert worker.main({"folder": str(tmp_path), "is_alone": True}, Outlets(1, file.fileno()), 0, -1) == 1
    assert capfd.readouterr().out.endswith(f"No space left on device while writing {tmp_path / 'result.json'}\n")


def known(events: Any, folder: Path) -> dict[str, Any]:
    spec = PointSpec("0" * 16, "n", 0, folder, {"vram": None}, {"mode": "train"})
    events.so_far = RowSoFar(spec)
    return {"status": "ok"}


def test_code_of_somebody_else_isn_t_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"callbacks": ["evil.Evil"], "resume": None}
    PointSpec("0" * 16, "n", 0, tmp_path, config, {"mode": "train"}).write()
    assert main([str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "it names code to run (callbacks: evil.Evil), and you haven't signed it here" in said


def test_a_specification_of_an_earlier_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PointSpec("0" * 16, "n", 0, tmp_path, dict.fromkeys(set(CHILDS_OWN) - {"jobs"}), {"mode": "train"}).write()
    assert main([str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "its spec.json was written by a version of lowvram without jobs: python train.py resume=" in said
    assert said.count("\n") == 1


def test_a_reason_without_a_row_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on and is refused leaves the row of the earlier one."""
    monkeypatch.setattr(worker, "write_row", lambda *_: False)
    monkeypatch.setattr(worker, "speak", lambda *_, **__: None)
    monkeypatch.setattr(worker.ChildStop, "listen", lambda _: None)
    refused = {"status": "incompatible", "reason": "it has changed"}
    monkeypatch.setattr(worker, "work", lambda _, events, *__: known(events, tmp_path) | refused)
    with (tmp_path / "events").open("wb") as file:
        assert worker.main({"folder": str(tmp_path), "is_alone": True}, Outlets(1, file.fileno()), 0, -1) == 3
    assert capfd.readouterr().out.endswith("it has changed\n")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_a_folder_must_be_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 3
    assert capsys.readouterr().err.startswith("usage: ")


def test_a_folder_without_a_specification_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert said.endswith(": its spec.json, which each run leaves: No such file or directory\n")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
