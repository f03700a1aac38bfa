"""The parent's end of the fork server. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lowvram.config.registry import neutral_options
from lowvram.config.settings import CHILDS_OWN
from lowvram.launch.events import Event, Following, Lines, Listener, opened_anew
from lowvram.launch.last_resort import last_resort
from lowvram.launch.process_tree import is_stopped, kill_all
from lowvram.launch.spec import Point, PointSpec
from lowvram.launch.supervisor import KILL, ORPHAN_GRACE_S, STOPS
from lowvram.results.row import Status

LARGEST_ANSWER_BYTES = 2**16
POLL_S = 0.1  # the longest delay before a signal or a time-out is passed on
STOPPED_GRACE_S = 5.0  # from an order until we kill a server that is stopped, as after Ctrl-Z
KILL_GRACE_S = 30.0  # from KILL until we kill a server that doesn't answer: freeing much memory takes the kernel long
STOP_GRACE_S = ORPHAN_GRACE_S + 5.0  # how long a server may take to end its child and itself
Ending = dict[str, Any]  # of one rank: see Supervisor.ended
Order = Callable[[], bytes | None]  # for the ranks, TERM or KILL, if there is one


class Runner(Protocol):
    """Runs the ranks of one point after another: a fork server, or this very process (process=inline)."""

    disturbs: str | None  # why what is measured isn't comparable; None if it is
    is_fresh: bool  # whether each request gets new processes, so that a point can be repeated

    def wait_until_ready(self, order: Order) -> None:
        """Wait until torch is imported, so that this doesn't count for a point's time; or until there is an order."""
        ...

    def run(self, point: Point, on_event: Listener, order: Order) -> list[Ending] | None:
        """Run the ranks of one point to their end: see `Server.run`."""
        ...

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        order: Order,
        on_event: Listener = lambda event: None,
        tries: int = 2,
    ) -> dict[str, Any]:
        """Have a process answer a question: see `Server.ask`."""
        ...


class Server:
    """The parent's handle of one fork server, which is started when it is first needed, and again if it dies."""

    disturbs: str | None = None  # a child runs only its point
    is_fresh = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start the server, which begins to import torch; returns at once. Does nothing if it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server inherits the mask, so that no signal hits it while it starts. Blocked, not ignored, here: this
        # process still gets signals that arrive meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            # -P: doesn't import from the current folder, where the user may have a random.py
            command = [sys.executable, "-P", "-m", "lowvram.launch.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        last_resort.server_pid = self._process.pid
        theirs.close()
        self._socket, self._is_ready = ours, False

    def stop(self) -> None:
        """End the server. A child that still runs has time to save."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            if not self._is_ready or is_stopped(self._process.pid):  # still importing: there is nothing to save
                kill_all(self._process.pid)
            try:
                self._process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                kill_all(self._process.pid)
                self._process.wait()
        self._process = self._socket = last_resort.server_pid = None

    def wait_until_ready(self, order: Order) -> None:
        self.start()
        with suppress(OSError):  # the server has died; `run` will then return None
            self._wait_ready(order)

    def run(self, point: Point, on_event: Listener, order: Order) -> list[Ending] | None:
        """Run the ranks of one point to their end.

        Args:
            on_event: called with each event of a rank, in the rank's order, and with what it prints.
            order: called every POLL_S; TERM or KILL, if it returns one, is passed on to all ranks.

        Returns:
            How each rank ended, in the order of their ends; None if the server itself died, or was killed with all its
            children because it didn't pass on an order.

        Raises:
            OSError: the point's folder can't be written.
        """
        point.write()
        launch = point.launch and vars(point.launch)
        request = {"folder": str(point.folder), "hidden": point.hidden(), "launch": launch, "fence": point.fence}
        if launch is None:
            if (num_ranks := self._num_ranks(point, order)) is None:
                return None
            request |= {"num_ranks": num_ranks, "timeout_s": point.config["sharding"]["timeout_s"]}
        self.start()
        writer, reader = opened_anew(point.folder)
        return self._serve(request, on_event, order, writer, Lines(reader, is_file=True), point.locks)

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        order: Order,
        on_event: Listener = lambda event: None,
        tries: int = 2,
    ) -> dict[str, Any]:
        """Have a process answer one of the questions of `worker/asks.py`. If it was killed or interrupted from outside,
        another one is asked.

        Args:
            on_event: called with what it tells before its answer, and with what it prints.
            order: as for `run`.
            tries: how many processes are asked.

        Returns:
            The fields of its answer; empty if it died without one.
        """
        noted, answer = Noted(order), dict[str, Any]()
        for _ in range(tries):
            self.start()
            reader, writer = os.pipe()
            answer.clear()
            told = answering(answer, on_event)
            self._serve({"ask": name, "arguments": arguments}, told, noted, writer, Lines(reader))
            if noted.message is not None or not is_lost(answer):
                break
        return answer

    def _num_ranks(self, spec: PointSpec, order: Order) -> int | None:
        """How many ranks the point takes on this machine; None if an order came first, as each comes once, or if nobody
        knows. A process is asked where that depends on the cards; if it refuses, the first rank will do so too."""
        ranks = spec.config["sharding"]["ranks"]
        if ranks == "1" or (ranks == "auto" and spec.choices["sharding"] == neutral_options()["sharding"]):
            return 1
        noted = Noted(order)
        answer = self.ask("ranks", {"config": {key: spec.config[key] for key in CHILDS_OWN}}, noted)
        return None if noted.message is not None or is_lost(answer) else answer.get("ranks", 1)

    def _serve(
        self,
        request: dict[str, Any],
        on_event: Listener,
        order: Order,
        writer: int,
        events: Lines,
        held: Sequence[int] = (),
    ) -> list[Ending] | None:
        """Hand a request over, and follow its processes. Closes `writer`, into which they write their events."""
        ended = None
        printed_in, printed_out = os.pipe()
        try:
            with Following(on_event, Lines(printed_in), events) as following:
                if self._hand_over(request, [printed_out, writer], held, order):
                    ended = self._follow(following, order)
        finally:
            if ended is None:  # it is dead, or `on_event` has raised: the next request gets a new server
                self.stop()
        return ended

    def _hand_over(self, request: dict[str, Any], fds: Sequence[int], held: Sequence[int], order: Order) -> bool:
        """Send the request, and close the descriptors `fds` in this process; False if the server has died, or if an
        order came first."""
        try:
            if not self._wait_ready(order):
                return False
            send(self._connection, request, [*fds, *held])
        except OSError:
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    @property
    def _connection(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _wait_ready(self, order: Order) -> bool:
        while not self._is_ready:
            if order() is not None:
                return False
            if select.select([self._connection], [], [], POLL_S)[0]:
                if not self._connection.recv(64):
                    return False
                self._is_ready = True
        return True

    def _follow(self, following: Following, order: Order) -> list[Ending] | None:
        sent_at: dict[bytes, float] = {}  # when each order was sent
        while True:
            ready = select.select([self._connection, *following.pipes()], [], [], POLL_S)[0]
            try:
                if message := order():
                    sent_at[message] = time.monotonic()
                    self._connection.send(message)
                if self._is_deaf(sent_at):
                    kill_all(self._pid)
                answer = self._connection.recv(LARGEST_ANSWER_BYTES) if self._connection in ready else None
            except OSError:
                answer = b""  # the server is dead
            if answer is not None:
                following.drain()
                return json.loads(answer) if answer else None
            following.read()

    def _is_deaf(self, sent_at: Mapping[bytes, float]) -> bool:
        """Whether the server hasn't obeyed an order in time."""
        now = time.monotonic()
        if now - sent_at.get(KILL, now) > KILL_GRACE_S:
            return True
        return now - min(sent_at.values(), default=now) > STOPPED_GRACE_S and is_stopped(self._pid)


class Noted:
    """An order, whose last message is kept."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.message: bytes | None = None

    def __call__(self) -> bytes | None:
        message = self._order()
        self.message = message or self.message
        return message


def is_lost(answer: Mapping[str, Any]) -> bool:
    """Whether a process was killed or interrupted before it answered."""
    return answer.get("status") in (None, Status.INTERRUPTED.value)


def answering(answer: dict[str, Any], on_event: Listener) -> Listener:
    """A listener that puts the fields of an answer into `answer`, and passes on the events before it."""

    def listen(event: Event) -> None:
        if event["event"] == "row":
            answer.update(event["fields"])
        else:
            on_event(event)

    return listen


def send(server: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> None:
    """Send a request of any size: its text is in a memory file, whose descriptor is sent before the others."""
    memory = os.memfd_create("request")
    try:
        with os.fdopen(os.dup(memory), "w") as file:
            json.dump(request, file)
        socket.send_fds(server, [b"run"], [memory, *fds])
    finally:
        os.close(memory)


# Environment variables that libraries read once, when torch is imported.
LIBRARIES = {
    "OMP_WAIT_POLICY": "passive",  # spinning threads on busy cores turned steps of 0.6 ms into 30 ms
    "MKL_DISABLE_FAST_MM": "1",  # else MKL keeps scratch memory of matrix products: up to 30 MiB for a small GPT-2
}


def environment() -> dict[str, str]:
    """The server's environment."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**LIBRARIES, **os.environ, "PYTHONPATH": path}
    for ours in ("HYDRA_FULL_ERROR", "WANDB_SERVICE"):  # these are for the parent only
        env.pop(ours, None)
    return env
