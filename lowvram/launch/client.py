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
from functools import partial
from pathlib import Path
from typing import Any

from lowvram.launch.process_tree import is_stopped, kill_all
from lowvram.launch.protocol import Event, EventReaders, Listener
from lowvram.launch.supervisor import ACKNOWLEDGED, KILL, ORPHAN_GRACE_S, STOPS

LARGEST_ANSWER_BYTES = 2**16
POLL_S = 0.1  # how soon a signal or a time-out is passed on
STOPPED_GRACE_S = 5.0  # from an order to the end of a server that stands still, as after Ctrl-Z
KILL_GRACE_S = 30.0  # from KILL to the end of one that doesn't answer: the kernel frees much memory first
STOP_GRACE_S = ORPHAN_GRACE_S + 5.0  # how long a server may take to end its child and itself
Ending = dict[str, Any]  # of one rank: see Supervisor.ended


class Server:
    """One fork server, started when it is first needed and started anew if it should die."""

    disturbs = None  # a child holds nothing but its point
    is_fresh = True  # each request gets processes of its own

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start importing in the background; returns at once."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Inherited, so that none hits a starting server. Blocked, not ignored: ours come through a moment later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            # -P: a file of the user's that is called random.py stays out of it
            command = [sys.executable, "-P", "-m", "lowvram.launch.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._socket, self._is_ready = ours, False

    def stop(self) -> None:
        """End the server; a child that still runs gets its grace."""
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
        self._process = self._socket = None

    def wait_until_ready(self, order: Callable[[], bytes | None]) -> None:
        """Until torch is imported, so that no point's time pays for it; or until there is an order."""
        self.start()
        with suppress(OSError):  # it has died: `run` returns None then
            self._wait_ready(order)

    def run(
        self, request: dict[str, Any], on_event: Listener, order: Callable[[], bytes | None], held: Sequence[int] = ()
    ) -> list[Ending] | None:
        """Run the ranks of one point to their end.

        Args:
            on_event: called with each event of a rank, in the rank's order. When it has taken a "commit", the first
                rank gets an answer.
            order: asked every POLL_S; TERM or KILL is passed on to all ranks.
            held: descriptors that each rank keeps open until it is dead, and nobody else does: of a file that is
                locked, so that the lock lasts as long as any of them.

        Returns:
            How each rank ended, in the order of their ends; None if the server itself died, or was killed with all its
            children because it didn't pass on an order.
        """
        self.start()
        ended = None
        reader, writer = os.pipe()
        answers, answer = os.pipe()
        try:
            with EventReaders(on_event, partial(acknowledge, answer)) as events:
                events.add(reader)
                if self._hand_over(request, [writer, answers, *held], [writer, answers], order):
                    ended = self._follow(events, order)
        finally:
            os.close(answer)
            if ended is None:  # it is dead, or `on_event` has raised and nobody listens any more: the next one is new
                self.stop()
        return ended

    def _hand_over(
        self, request: dict[str, Any], fds: Sequence[int], to_close: Sequence[int], order: Callable[[], bytes | None]
    ) -> bool:
        """Send the request, and close the descriptors `to_close` here; False if the server has died, or isn't wanted
        any more."""
        try:
            if not self._wait_ready(order):
                return False
            send(self._connection, request, fds)
        except OSError:
            return False
        finally:
            for fd in to_close:
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

    def _wait_ready(self, order: Callable[[], bytes | None]) -> bool:
        while not self._is_ready:
            if order() is not None:
                return False
            if select.select([self._connection], [], [], POLL_S)[0]:
                if not self._connection.recv(64):
                    return False
                self._is_ready = True
        return True

    def _follow(self, events: EventReaders, order: Callable[[], bytes | None]) -> list[Ending] | None:
        sent_at: dict[bytes, float] = {}  # when each order was sent
        while True:
            ready = select.select([self._connection, *events.open_files()], [], [], POLL_S)[0]
            try:
                if message := order():
                    sent_at[message] = time.monotonic()
                    self._connection.send(message)
                if self._is_deaf(sent_at):
                    kill_all(self._pid)
                answer = self._receive(events) if self._connection in ready else None
            except OSError:
                answer = b""  # the server is dead
            if answer is not None:
                events.drain()
                return json.loads(answer)["ended"] if answer else None
            if ready:
                events.read()

    def _is_deaf(self, sent_at: Mapping[bytes, float]) -> bool:
        """Whether the server has not passed on an order in time."""
        now = time.monotonic()
        if now - sent_at.get(KILL, now) > KILL_GRACE_S:
            return True
        return now - min(sent_at.values(), default=now) > STOPPED_GRACE_S and is_stopped(self._pid)

    def _receive(self, events: EventReaders) -> bytes | None:
        """The answer; None for the events of one more rank, which are followed from now on."""
        message, fds, _, _ = socket.recv_fds(self._connection, LARGEST_ANSWER_BYTES, 1)
        for fd in fds:
            events.add(fd)
        return None if fds else message


def acknowledge(fd: int) -> None:
    """Tell the first rank that its "commit" was taken, if it still lives."""
    with suppress(BrokenPipeError):
        os.write(fd, ACKNOWLEDGED)


def send(server: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> None:
    """A request of any size: its text travels in a memory file, in front of the other descriptors."""
    memory = os.memfd_create("request")
    try:
        with os.fdopen(os.dup(memory), "w") as file:
            json.dump(request, file)
        socket.send_fds(server, [b"run"], [memory, *fds])
    finally:
        os.close(memory)


# Libraries read these once, when torch is imported.
LIBRARIES = {
    "OMP_WAIT_POLICY": "passive",  # threads that spin on busy cores turned steps of 0.6 ms into 30 ms
    "MKL_DISABLE_FAST_MM": "1",  # else MKL keeps scratch memory of matrix products: up to 30 MiB for a small GPT-2
}


def environment() -> dict[str, str]:
    """The server's environment."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**LIBRARIES, **os.environ, "PYTHONPATH": path}
    for ours in ("HYDRA_FULL_ERROR", "WANDB_SERVICE"):  # set for the parent alone
        env.pop(ours, None)
    return env


__all__ = ["KILL", "Event", "Server"]
