"""process=inline: debuggers and profilers see the point on the user's own terminal; the row says what its figures are.

The row, the files and the exit codes are those of a child's point: tests/launch/test_faults.py has those.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.launch.client import Server
from tests.calls import ROOT, TINY, Outcome, Running, environment, goes_on, history, wait_until

Call = Callable[..., Outcome]
Start = Callable[..., Running]
MARK = "process=inline: peaks and times are those of the whole program"
# A model of the user's that does something in one of its calls, and counts them.
MINE = """
import os, signal, threading, time
from torch import nn

class Mine(nn.Sequential):
    calls = 0

    def __init__(self, at=3, does="pass"):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.at, self.does = at, does

    def forward(self, x):
        Mine.calls += self.training and len(x) == 4  # not where its blocks are looked for
        if Mine.calls >= self.at:
            exec(self.does)
        return super().forward(x)
"""
WORDS = (
    "process=inline",
    "model=external",
    "model.target=mine.Mine",
    "data=external",
    "data.target=tests.yours.curve",
    "task=external",
    "task.target=tests.yours.Regression",
    "train.batch_size=4",
    "train.steps=4",
    "logger=none",
)


@pytest.fixture
def mine(tmp_path: Path) -> tuple[str, ...]:
    """The words that train the user's model, whose file is in the working directory."""
    (tmp_path / "mine.py").write_text(MINE)
    return WORDS


def does(what: str, at: int = 3) -> tuple[str, ...]:
    """What the model does from that call on."""
    return (f'model.args={{at: {at}, does: "{what}"}}',)


def on_a_terminal(cwd: Path, *words: str, answers: list[str]) -> tuple[int, str]:
    """The program on a terminal of its own: each `answer` is typed at a prompt of pdb. Its exit code, and all text."""
    ours, theirs = pty.openpty()
    env = {**environment(), "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONBREAKPOINT": "pdb.set_trace"}
    command = [sys.executable, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            new = os.read(ours, 2**16).decode(errors="replace")
        except OSError:  # nobody holds the other end
            break
        text += new
        if answers and text.endswith("(Pdb) "):
            os.write(ours, f"{answers.pop(0)}\n".encode())
    os.close(ours)
    return process.wait(10), text


@pytest.mark.slow
def test_a_breakpoint_is_on_the_users_terminal(mine: tuple[str, ...], tmp_path: Path) -> None:
    """In the frame of her code, where the numbers are real; after it the run goes on."""
    answers = ["p 'in', type(self).__name__, tuple(x.shape)", "self.does = 'pass'", "c"]
    code, text = on_a_terminal(tmp_path, *mine, *does("breakpoint()"), answers=answers)
    assert code == 0, text
    assert not answers
    assert "('in', 'Mine', (4, 4))" in text
    outcome = Outcome(code, text, "", tmp_path)
    assert outcome.row["status"] == "ok"
    assert outcome.row["disturbed"] == MARK
    assert f"disturbed: {MARK}" in text
    assert len(history(outcome.folder)) == 5  # four steps and the evaluation


@pytest.mark.slow
def test_leaving_the_debugger_interrupts(mine: tuple[str, ...], tmp_path: Path) -> None:
    code, text = on_a_terminal(tmp_path, *mine, *does("breakpoint()"), answers=["q"])
    assert code == 75, text
    row = Outcome(code, text, "", tmp_path).row
    assert (row["status"], row["reason"]) == ("interrupted", "left in the debugger")
    assert "Traceback" not in text


@pytest.mark.slow
def test_an_error_is_a_row_and_goes_up_as_it_is(mine: tuple[str, ...], train: Call) -> None:
    """So `python -m pdb`, and the debugger of an editor, stop where it was raised."""
    outcome = train(*mine, *does("raise ValueError('mine')"), env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 1
    assert outcome.row["status"] == "error"
    assert outcome.row["reason"] == "ValueError: mine"
    assert outcome.err.startswith("step 3 has failed; step 2 is saved\nTraceback (most recent call last):\n")
    assert outcome.err.endswith("ValueError: mine\n")
    assert "mine.py" in outcome.err
    assert f"error: {outcome.row['reason']}" in outcome.out


@pytest.mark.slow
def test_it_is_the_same_run_in_one_process(start: Start, call: Call, tmp_path: Path) -> None:
    """Losses to the last digit, W&B and all; no process is started but W&B's."""
    (tmp_path / "here").mkdir()
    running = start(*TINY, "process=inline", "train.steps=200", cwd=tmp_path / "here")
    running.wait_for("started")
    assert list(running.processes()) == [running.process.pid]
    here = running.end()
    assert here.code == 0, here.said()
    there = call(*TINY, "train.steps=200", "paths.outputs=there")
    assert history(here.folder) == history(there.folder)
    assert here.row["model"] == there.row["model"]
    assert here.row["memory"]["peak_bytes"] == there.row["memory"]["peak_bytes"]
    assert "inline" not in (there.row["disturbed"] or "")  # it may be by others
    assert here.row["id"] != there.row["id"]  # its figures are none of a point's


@pytest.mark.slow
def test_ctrl_c_saves_and_the_printed_command_goes_on(mine: tuple[str, ...], start: Start, train: Call) -> None:
    slow = does("time.sleep(0.05)")
    running = start(*mine, *slow, "train.steps=900", env={"PYTHONPATH": str(ROOT)})
    running.wait_for("started")
    (file,) = running.cwd.glob("**/metrics.jsonl")
    wait_until(lambda: len(file.read_text().splitlines()) >= 2, "two steps")
    running.signal_group()
    outcome = running.end()
    assert goes_on(outcome, lambda *words: train(*words, env={"PYTHONPATH": str(ROOT)})).row["status"] == "ok"


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_step(mine: tuple[str, ...], start: Start) -> None:
    running = start(*mine, *does("print('stuck'); time.sleep(50)"), env={"PYTHONPATH": str(ROOT)})
    running.wait_for("stuck")
    running.signal_group()
    time.sleep(0.3)
    running.signal_group()
    outcome = running.end(20)
    assert outcome.code == 75, outcome.said()
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == "ended by a second signal before it could save"


@pytest.mark.slow
def test_the_time_limit_holds(mine: tuple[str, ...], train: Call) -> None:
    words = (*does("time.sleep(0.1)"), "train.steps=900", "timeout_s=6")
    outcome = train(*mine, *words, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 1, outcome.said()
    assert (outcome.row["status"], outcome.row["reason"]) == ("timeout", "still running after timeout_s=6")
    assert list(outcome.folder.glob("snapshots/*"))


@pytest.mark.slow
def test_out_of_memory_can_not_begin_again(mine: tuple[str, ...], train: Call) -> None:
    words = (*does("raise MemoryError"), "accum=auto")
    outcome = train(*mine, *words, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 1, outcome.said()
    assert outcome.row["status"] == "oom"
    ending = "a process that ran out of memory can't begin again with more parts: type accum.parts=2"
    assert outcome.row["reason"].endswith(ending)


def test_a_plan_is_made_here_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "ask", None)
    outcome = call(*TINY, "process=inline", "mode=plan")
    assert outcome.code == 0, outcome.said()
    assert outcome.row["plan"]["allocated_bytes"] > 0


@pytest.mark.slow
def test_a_breakpoint_in_a_child_is_refused(mine: tuple[str, ...], train: Call) -> None:
    """pdb would wait there for ever."""
    outcome = train(*mine, *does("breakpoint()"), "process=child", env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 1, outcome.said()  # its first steps stay
    sentence = "process='child': must be inline where the code calls breakpoint(): a child has no terminal"
    assert outcome.row["reason"] == sentence


REFUSED = {
    "sharding=ddp sharding.ranks=2": "process='inline': must be child for 2 ranks: each is a process of its own",
    "mode=search vram=100MiB": "process=inline: must be child with mode=search, each of whose probes needs a process",
    "-m seed=1,2": "process=inline: must be child for 2 points, each of which needs a process",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_takes_more_processes_is_refused(call: Call, words: str) -> None:
    outcome = call(*TINY, "process=inline", *words.split())
    assert outcome.sentence == REFUSED[words]
    assert list(outcome.cwd.iterdir()) == []


def test_torchrun_starts_other_processes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    outcome = call(*TINY, "process=inline")
    assert outcome.sentence == "process=inline: must be child under torchrun"
