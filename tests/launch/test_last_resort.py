"""A program that its own code blocks hears a third signal and its time limit; a closed terminal is a signal."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.launch.last_resort import LOOK_S, MOST_SIGNALS, SAVING_S, SIGNAL_GRACE_S, LastResort, last_resort
from lowvram.launch.spec import Point
from lowvram.launch.stop import SignalCount
from lowvram.results import row as rows
from lowvram.runs.recorder import Recording
from lowvram.runs.row_so_far import RowSoFar
from tests.calls import TINY, Outcome, Running, goes_on, read_row

Start = Callable[..., Running]
Call = Callable[..., Outcome]
BLOCKING = """
import ctypes, time

class InPython:
    def step(self, step, values):
        time.sleep(999)

class InC:
    def step(self, step, values):
        for _ in range(9):
            ctypes.CDLL(None).sleep(999)
"""


@pytest.mark.slow
def test_a_program_that_has_ended_is_watched_no_more() -> None:
    """Calls in one process: signals of one are none of the next."""
    before, handler = threading.active_count(), signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        for _ in range(2):
            with last_resort.watching():
                for _ in range(MOST_SIGNALS - 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(SIGNAL_GRACE_S + 2 * LOOK_S)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert threading.active_count() == before


def test_signals_to_a_fork_are_not_the_programs() -> None:
    """Nor are they written into a file of the fork's that has the number of the pipe."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with last_resort.watching():
            pid = os.fork()
            if not pid:
                for _ in range(MOST_SIGNALS):
                    os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            time.sleep(SIGNAL_GRACE_S + 2 * LOOK_S)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_limit_on_threads_is_left_to_those_who_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with last_resort.watching():
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_point_may_end_while_the_watcher_looks_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that fails then would hear no third signal any more."""
    values = itertools.cycle([0.0, None])  # late, and ended right after that was read
    monkeypatch.setattr(LastResort, "_late_s", property(lambda _: next(values), lambda *_: None), raising=False)
    looks, errors = list[float](), list[object]()
    monkeypatch.setattr(LastResort, "_end_late", lambda _, late_s: looks.append(late_s))
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with LastResort().watching():
        time.sleep(5 * LOOK_S)
    assert looks
    assert not errors


def test_the_fork_server_may_end_while_the_watcher_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = itertools.cycle([7, None])  # a process, which has ended right after that was read
    pids, codes = list[object](), list[int]()
    monkeypatch.setattr(LastResort, "server_pid", property(lambda _: next(values), lambda *_: None), raising=False)
    monkeypatch.setattr("lowvram.launch.last_resort.children", lambda pid: pids.append(pid) or [])
    monkeypatch.setattr("lowvram.launch.last_resort.kill_all", pids.append)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    watcher: Any = LastResort()
    watcher._end_late(SAVING_S + 1)
    assert len(codes) == 1
    assert None not in pids


def blocked(start: Start, folder: Path, name: str, *words: str) -> Running:
    (folder / "blocking.py").write_text(BLOCKING)
    slow = ("name=slow", "train.steps=900")
    call = start(*TINY, *slow, "device=cpu", "plan.skip=true", f"callbacks=[blocking.{name}]", *words)
    call.wait_for("started")
    return call


@pytest.mark.slow  # the tests of the watcher above are quicker
@pytest.mark.parametrize("name", ["InC", "InPython"])
def test_a_third_signal_ends_a_program_whose_callback_blocks_it(start: Start, tmp_path: Path, name: str) -> None:
    call = blocked(start, tmp_path, name)
    time.sleep(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        call.process.send_signal(number)
        time.sleep(0.1)
    outcome = call.end(20)
    assert outcome.code == 75, outcome.said()
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == "ended by a third signal before it could save"
    call.wait_until_gone()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["InC", "InPython"])
def test_the_time_limit_holds_while_a_callback_blocks(start: Start, tmp_path: Path, name: str) -> None:
    call = blocked(start, tmp_path, name, "timeout_s=3")
    outcome = call.end(40)
    assert outcome.code == 1, outcome.said()
    assert outcome.row["status"] == "timeout"
    assert "a callback, blocked it" in outcome.row["reason"]
    call.wait_until_gone()


def test_a_row_that_the_point_itself_has_written_stays(tmp_path: Path) -> None:
    """As where a callback blocks the program after the point's end."""
    recording = Recording.__new__(Recording)
    recording._row_before = None
    recording.point, recording._earlier = Point("0" * 16, "n", 0, tmp_path, {}, {}), None
    recording._so_far = RowSoFar(recording.point)
    recording.abandon("interrupted", "ended by a third signal before it could save")
    assert read_row(tmp_path)["status"] == "interrupted"
    rows.write(tmp_path, rows.merge(recording.row, {"status": "ok"}))
    recording.abandon("interrupted", "ended by a third signal before it could save")
    assert read_row(tmp_path)["status"] == "ok"


def test_a_closed_terminal_is_one_request_to_stop(start: Start, call: Call) -> None:
    """Though the shell repeats it, and all processes get it."""
    running = start(*TINY, "device=cpu", "plan.skip=true", "loader=workers", "train.steps=900", "name=slow")
    running.wait_for("started")
    for _ in range(2):
        running.signal_group(signal.SIGHUP)
        time.sleep(0.05)
    goes_on(running.end(), call)
    running.wait_until_gone()


def test_signals_are_counted_once_from_the_terminal() -> None:
    count = SignalCount()
    for number, wanted in ((signal.SIGHUP, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2), (signal.SIGHUP, 2)):
        count.add(number)
        assert count() == wanted


def test_nohup_holds() -> None:
    """A hang-up that is ignored stays ignored."""
    code = "from lowvram.launch.supervisor import STOPS; import signal; print(signal.SIGHUP in STOPS)"
    for words, wanted in (([], "True"), (["nohup"], "False")):
        found = subprocess.run([*words, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == wanted
