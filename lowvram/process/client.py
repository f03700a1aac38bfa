"""The parent's end of the fork server. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowvram.process.server import KILL, STOPS

POLL_S = 0.1  # how soon a signal or a time-out is passed on
Event = dict[str, Any]


class Server:
    """One fork server, started when it is first needed and started anew if it should die."""

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
            command = [sys.executable, "-P", "-m", "lowvram.process.server", str(theirs.fileno())]
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
            if not self._is_ready:
                self._process.kill()  # still importing: there is nothing to save
            self._process.wait()
        self._process = self._socket = None

    def run(
        self, request: dict[str, Any], on_event: Callable[[Event], None], order: Callable[[], bytes | None]
    ) -> int | None:
        """Run one child to its end.

        Args:
            on_event: called with each event of the child, in order.
            order: asked every POLL_S; TERM or KILL is passed on to the child.

        Returns:
            The child's wait status, or None if the server itself died.
        """
        self.start()
        status = None
        reader, writer = os.pipe()
        try:
            with os.fdopen(reader, "rb", buffering=0) as events:
                if self._hand_over(request, writer, order):
                    status = self._follow(EventReader(events, on_event), order)
        finally:
            if status is None:  # it is dead, or `on_event` has raised and nobody listens any more: the next one is new
                self.stop()
        return status

    def _hand_over(self, request: dict[str, Any], writer: int, order: Callable[[], bytes | None]) -> bool:
        """Send the request; False if the server has died, or isn't wanted any more."""
        try:
            if not self._wait_ready(order):
                return False
            send(self._connection, request, writer)
        except OSError:
            return False
        finally:
            os.close(writer)
        return True

    @property
    def _connection(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _wait_ready(self, order: Callable[[], bytes | None]) -> bool:
        while not self._is_ready:
            if order() is not None:
                return False
            if select.select([self._connection], [], [], POLL_S)[0]:
                if not self._connection.recv(64):
                    return False
                self._is_ready = True
        return True

    def _follow(self, events: EventReader, order: Callable[[], bytes | None]) -> int | None:
        while True:
            ready = select.select([self._connection, *events.open_files()], [], [], POLL_S)[0]
            try:
                if told := order():
                    self._connection.send(told)
                answer = self._connection.recv(4096) if self._connection in ready else None
            except OSError:
                answer = b""  # the server is dead
            if answer is not None:
                events.drain()
                return json.loads(answer)["status"] if answer else None
            if ready:
                events.read()


class EventReader:
    """Lines of JSON from the child's pipe. A torn last line of a child that was killed is dropped."""

    def __init__(self, file: Any, on_event: Callable[[Event], None]) -> None:
        self._file, self._on_event = file, on_event
        self._rest, self._at_end = b"", False

    def open_files(self) -> list[Any]:
        return [] if self._at_end else [self._file]

    def read(self) -> None:
        """Pass on what is there now."""
        if self._at_end or not select.select([self._file], [], [], 0)[0]:
            return
        data = self._file.read(1 << 16)
        self._at_end = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_event(json.loads(line))

    def drain(self) -> None:
        """Pass on all that is left. The child is dead by now, so this ends."""
        while not self._at_end and select.select([self._file], [], [], 0)[0]:
            self.read()


def send(server: socket.socket, request: dict[str, Any], events_fd: int) -> None:
    """A request of any size: its text travels in a memory file."""
    memory = os.memfd_create("request")
    try:
        with os.fdopen(os.dup(memory), "w") as file:
            json.dump(request, file)
        socket.send_fds(server, [b"run"], [memory, events_fd])
    finally:
        os.close(memory)


def environment() -> dict[str, str]:
    """The server's environment."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # passive: OpenMP threads that spin on busy cores turned steps of 0.6 ms into 30 ms
    env = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}
    for ours in ("HYDRA_FULL_ERROR", "WANDB_SERVICE"):  # set for the parent alone
        env.pop(ours, None)
    return env


__all__ = ["KILL", "Server"]
