"""Starts, watches and ends the processes of one point, one per rank, inside the fork server. Imports no torch.

Each rank gets the environment variables that torchrun would set. When one rank has ended, the others are asked to end
and then killed, so that none waits for ever.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.config.exit_codes import EXIT_INTERRUPTED
from lowvram.launch.process_tree import is_stopped
from lowvram.results.files.durable import LEFTOVER
from lowvram.results.files.run_folder import SNAPSHOTS

HERE = "127.0.0.1"
WORKER = "lowvram.worker.main"  # started by its name: nothing here imports torch
TERM, KILL = b"term", b"kill"
MOST_FDS = 64  # with one message
# A closed terminal asks to stop, too; not after nohup, which has it ignored in all processes that it starts.
HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOPS = (signal.SIGINT, signal.SIGTERM, *HANG_UP)
ORPHAN_GRACE_S = 10.0  # from SIGTERM to SIGKILL when the parent is gone: time to save a last snapshot
LOOK_S, SAVING_GRACE_S = 0.2, 60.0  # how often a rank that saves is looked at, and for how long
RANK_GRACE_S = 5.0  # from SIGTERM to SIGKILL for the other ranks when one has failed
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EXIT_ORPHANED = 70
EXIT_NOT_FORKED = 71  # of a rank that couldn't be started

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


@dataclass(frozen=True)
class Outlets:
    """The descriptors into which all ranks write: what they print, and their events."""

    printed: int
    events: int


@dataclass
class Member:
    """A rank's process that hasn't ended."""

    rank: int
    pid: int
    ended_by: str | None = None  # the last signal that we sent because another rank had ended: "term" or "kill"
    is_stopped: bool = False  # whether it was stopped, as after Ctrl-Z, when we killed it


class Supervisor:
    """Starts, watches and ends the processes of one point."""

    def __init__(self, request: dict[str, Any], outlets: Outlets, parent: socket.socket) -> None:
        self.ended: list[dict[str, Any]] = []  # in the order of their ends
        self.parent_is_there = True
        self._request, self._outlets, self._parent = request, outlets, parent
        self._num_ranks: int = request.get("num_ranks", 1)
        self._alive: dict[int, Member] = {}  # by pidfd
        self._deadline: float | None = None  # time.monotonic() at which processes that still run are killed
        self._grace_s: float = request.get("timeout_s", ORPHAN_GRACE_S)  # of ranks that wait for one that has ended
        self._late_s: float | None = None  # see `_first_late_s`

    def run(self, held: Sequence[int]) -> None:
        """Run all ranks to their end. Closes the descriptors in this process."""
        with socket.socket() as listener:  # of the store where ranks meet: on this machine alone, at any free port
            if self._num_ranks > 1:
                listener.bind((HERE, 0))
                listener.listen()
            for rank in range(self._num_ranks):
                self._fork(rank, listener)
        for fd in (*held, self._outlets.printed, self._outlets.events):
            os.close(fd)
        while self._alive:
            self._watch()

    def _fork(self, rank: int, listener: socket.socket) -> None:
        server = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # so that none is lost before the child has its handlers
        try:
            pid = os.fork()
        except OSError:  # a limit on processes, or no memory
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            self.ended.append({"rank": rank, "status": EXIT_NOT_FORKED << 8, "ended_by": None, "is_stopped": False})
            self._let_follow(EXIT_NOT_FORKED)
            return
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            self._alive[os.pidfd_open(pid)] = Member(rank, pid)
            return
        code = EXIT_ORPHANED
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:  # else the server died before prctl, so that no signal will come
                self._parent.close()
                if self._num_ranks > 1:
                    set_variables(rank, self._num_ranks, listener.getsockname()[1])
                if rank:
                    listener.close()
                worker = importlib.import_module(WORKER)
                code = worker.main(self._request, self._outlets, rank, listener.fileno())
        finally:
            os._exit(code)  # no destructors, no atexit: milliseconds instead of half a second

    def _watch(self) -> None:
        """Wait for the next event, and react to it."""
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        listening = [*self._alive, self._parent] if self.parent_is_there else list(self._alive)
        ready = set(select.select(listening, [], [], left_s)[0])
        for fd in ready & self._alive.keys():  # note all ends first, before a rank is signalled because of another one
            self._note_end(fd)
        if self._parent in ready:
            self._obey()
        if not ready and self._deadline is not None and time.monotonic() >= self._deadline:
            self._kill_late()

    def _note_end(self, fd: int) -> None:
        member = self._alive.pop(fd)
        os.close(fd)
        status = os.waitpid(member.pid, 0)[1]
        about = {"ended_by": member.ended_by, "is_stopped": member.is_stopped}
        self.ended.append({"rank": member.rank, "status": status, **about})
        self._let_follow(os.waitstatus_to_exitcode(status))

    def _let_follow(self, exit_code: int) -> None:
        """After one rank has ended: ask the others to end if it failed or was interrupted, and set their deadline."""
        has_failed = exit_code not in (0, EXIT_INTERRUPTED)
        for member in self._alive.values() if exit_code else ():
            member.ended_by = "term"
            os.kill(member.pid, signal.SIGTERM)
        self._end_within(RANK_GRACE_S if has_failed else self._grace_s)

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _kill_late(self) -> None:
        if self._is_saving() and time.monotonic() < self._first_late_s() + SAVING_GRACE_S:
            self._deadline = time.monotonic() + LOOK_S
            return
        for member in self._alive.values():
            member.ended_by, member.is_stopped = "kill", is_stopped(member.pid)
            os.kill(member.pid, signal.SIGKILL)
        self._deadline = None

    def _is_saving(self) -> bool:
        """Whether a rank that is still there writes a snapshot now: of what was done before another rank failed."""
        folder = Path(self._request.get("folder", os.devnull)) / SNAPSHOTS
        return folder.is_dir() and any(LEFTOVER.fullmatch(path.name) for path in folder.iterdir())

    def _first_late_s(self) -> float:
        """When it was first too late; time.monotonic()."""
        self._late_s = self._late_s or time.monotonic()
        return self._late_s

    def _obey(self) -> None:
        """Pass a message of the parent on to all ranks."""
        message = self._parent.recv(64)
        for member in self._alive.values():
            os.kill(member.pid, signal.SIGKILL if message == KILL else signal.SIGTERM)
        if not message:
            self.parent_is_there = False
            self._end_within(ORPHAN_GRACE_S)


def set_variables(rank: int, num_ranks: int, port: int) -> None:
    """Set the environment variables that torchrun would have set, which libraries read, too."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in words.items()} | {"MASTER_ADDR": HERE})
    os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo resolves the machine's name, which may fail
