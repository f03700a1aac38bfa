"""The parent's end of the fork server: requests one after another, whatever becomes of them."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.config.settings import CHILDS_OWN
from lowvram.launch import client
from lowvram.launch.client import Event, Server
from lowvram.launch.events import Lines
from lowvram.launch.spec import Point
from lowvram.launch.supervisor import KILL, TERM
from tests.calls import TINY, Outcome, children, wait_until
from tests.tiers import first_of

Call = Callable[..., Outcome]


@pytest.fixture
def request_for(call: Call, tmp_path: Path) -> Callable[[str], Point]:
    """Makes a tiny point, with a fault."""
    row = call(*TINY, "train.steps=1").row

    def make(fault: str) -> Point:
        config = {key: row["config"][key] for key in CHILDS_OWN} | {"name": fault}
        return Point("0" * 16, "n", 0, tmp_path, config, row["choices"])

    return make


def pid_of(server: Server) -> int:
    assert server._process is not None
    return server._process.pid


def run(server: Server, request: Point) -> tuple[int | None, dict[str, Any]]:
    """How the child died, and its row."""
    events: list[Event] = []
    give_up = time.monotonic() + 20
    ended = server.run(request, events.append, lambda: KILL if time.monotonic() > give_up else None)
    rows = [event["fields"] for event in events if event["event"] == "row"]
    return ended[0]["status"] if ended else None, rows[0] if rows else {}


@pytest.mark.parametrize("times", first_of([3, 10]))
def test_no_signal_is_lost_however_early_it_comes(
    shared_server: Server, request_for: Callable[[str], Point], times: int
) -> None:
    """A child inherits that signals are ignored; one that comes before it listens must be answered all the same."""
    request = request_for("hang@0")
    for _ in range(times):
        killer = threading.Thread(target=terminate_at_once, args=[pid_of(shared_server)])
        killer.start()
        status, row = run(shared_server, request)
        killer.join()
        assert row == {**row, "status": "interrupted", "reason": "stopped in the set-up"}
        assert status is not None
        assert os.waitstatus_to_exitcode(status) == 75


def terminate_at_once(server: int) -> None:
    """The next child, the moment it is there."""
    while not (found := children(server)):
        pass
    os.kill(found[0], signal.SIGTERM)


@pytest.mark.slow
def test_what_a_handler_raises_comes_up_and_the_next_request_is_answered(
    shared_server: Server, request_for: Callable[[str], Point]
) -> None:
    """Not with the answer to the one before; and the child that nobody listens to ends."""

    def on_event(event: Event) -> None:
        raise KeyError(event["event"])

    before = pid_of(shared_server)
    with pytest.raises(KeyError):
        shared_server.run(request_for("slow"), on_event, lambda: None)
    wait_until(lambda: not children(before), "the end of the child")
    assert run(shared_server, request_for("raise@1"))[1]["status"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("order", [TERM, KILL])
def test_a_server_that_stands_still_ends_with_its_children_and_the_next_request_gets_another(
    shared_server: Server, request_for: Callable[[str], Point], monkeypatch: pytest.MonkeyPatch, order: bytes
) -> None:
    """As after `kill -STOP`: it passes nothing on, so a time limit and Ctrl-C would be in vain."""
    monkeypatch.setattr(client, "STOPPED_GRACE_S", 0.3)
    pid, found = pid_of(shared_server), list[int]()

    def on_event(event: Event) -> None:
        if event["event"] == "metrics" and not found:
            os.kill(pid, signal.SIGSTOP)
            found.extend(children(pid))

    orders = iter([order])
    assert shared_server.run(request_for("slow"), on_event, lambda: next(orders, None) if found else None) is None
    assert found
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in (pid, *found)), "the end of all")
    assert run(shared_server, request_for("raise@1"))[1]["status"] == "error"
    assert pid_of(shared_server) != pid


def test_an_order_that_comes_while_ranks_are_counted_ends_the_point(shared_server: Server, call: Call) -> None:
    """Each order is given once: the run that is to follow would hear of it no more."""
    outcome = call(*TINY, "sharding=ddp", "sharding.ranks=2", "train.steps=1", "device=cpu")
    point = Point.read(outcome.folder)
    orders, events = iter([None, TERM]), list[Event]()
    assert shared_server.run(point, events.append, lambda: next(orders, None)) is None
    assert events == []


def test_no_file_is_left_open(shared_server: Server, request_for: Callable[[str], Point]) -> None:
    request = request_for("exit17@1")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        status, row = run(shared_server, request)
        assert (os.waitstatus_to_exitcode(status or 0), row) == (17, {})
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


@pytest.mark.slow
def test_a_request_may_be_larger_than_any_socket_takes(
    shared_server: Server,
) -> None:
    asked = {"config": {"padding": "x" * 2**22}, "choices": {}}
    answer = shared_server.ask("reference", asked, lambda: None)
    assert answer["status"] == "incompatible"  # it has read it, and found it no configuration


@pytest.mark.parametrize("num_ranks", first_of([2, 1]))
def test_what_is_held_is_open_until_the_last_rank_is_dead(
    shared_server: Server, call: Call, tmp_path: Path, num_ranks: int
) -> None:
    """Of a file that is locked: the caller may be gone, the server has no copy."""
    sharding = "ddp" if num_ranks > 1 else "none"
    row = call(*TINY, f"sharding={sharding}", f"sharding.ranks={num_ranks}").row
    config: dict[str, Any] = {key: row["config"][key] for key in CHILDS_OWN} | {"name": "hang"}
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    seen: list[list[bool]] = []

    def on_event(event: Event) -> None:
        if event["event"] == "metrics":
            os.close(held)
            assert is_locked(tmp_path / "lock")
            pid = pid_of(shared_server)
            seen.append([holds(process, tmp_path / "lock") for process in (pid, *children(pid))])

    point = Point("0" * 16, "n", 0, tmp_path, config, row["choices"], locks=[held])
    ended = shared_server.run(point, on_event, lambda: KILL if seen else None)
    assert ended is not None
    assert seen == [[False, *[True] * num_ranks]]
    assert not is_locked(tmp_path / "lock")


def holds(pid: int, file: Path) -> bool:
    return any(os.path.realpath(fd) == str(file) for fd in Path(f"/proc/{pid}/fd").iterdir())


def is_locked(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.medium
@pytest.mark.slow
def test_a_server_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it imported is frozen and never freed: a library that looks for leaks at the end (Triton 3.9) finds some."""
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'leaked')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = Server()
    server.wait_until_ready(lambda: None)
    server.stop()
    assert capfd.readouterr() == ("", "")


class Answering(Server):
    """A server whose processes end as told, one after another."""

    def __init__(self, *endings: dict[str, Any]) -> None:
        super().__init__()
        self.endings = list(endings)

    def start(self) -> None: ...

    def _serve(
        self, request: Any, on_event: Any, order: Any, writer: int, events: Lines, held: Sequence[int] = ()
    ) -> list[dict[str, Any]] | None:
        os.close(writer)
        order()
        if ending := self.endings.pop(0):
            on_event({"event": "row", "fields": ending})
        return []


STOPPED = {"status": "interrupted", "reason": "stopped by a signal"}


@pytest.mark.parametrize("lost", [{}, STOPPED])
def test_a_process_that_was_ended_from_outside_is_asked_anew(lost: dict[str, Any]) -> None:
    """Not after an order to stop; and what nobody answers isn't guessed."""
    two = {"status": "ok", "ranks": 2}
    assert Answering(lost, two).ask("ranks", {}, lambda: None) == two
    assert Answering(lost, two).ask("ranks", {}, lambda: TERM) == lost
    spec: Any = SimpleNamespace(
        config=dict.fromkeys(CHILDS_OWN, 0) | {"sharding": {"ranks": "2"}}, choices={"sharding": "ddp"}
    )
    assert Answering(lost, two)._num_ranks(spec, lambda: None) == 2
    assert Answering(lost, lost)._num_ranks(spec, lambda: None) is None
    assert Answering({"status": "incompatible"})._num_ranks(spec, lambda: None) == 1
