"""Starts, watches and ends the processes of one point, one per rank, inside the fork server. Imports no torch.

The first rank determines the number of ranks (the fork server must not query CUDA devices) and asks for the others.
When one rank has ended, the others are asked to end and then killed, so that none waits for ever.
"""

from __future__ import annotations

import ctypes
import importlib
import json
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

WORKER = "lowvram.worker.main"  # started by its name: nothing here imports torch
TERM, KILL = b"term", b"kill"
MOST_FDS = 64  # with one message
MOST_RANKS = 2**16  # of a point
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
class RankPlace:
    """What a new process is told of its place among the ranks of its point."""

    rank: int
    call: socket.socket | None = None  # of the first rank, which asks for the others through it
    held: tuple[int, ...] = ()  # descriptors that it keeps open, and passes on to the ranks that it asks for
    num_ranks: int = 1
    port: int = 0  # of the first rank's store, on this machine


@dataclass(frozen=True)
class Outlets:
    """The descriptors into which all ranks write: what they print, and their events."""

    printed: int
    events: int


@dataclass(frozen=True)
class RanksCall:
    """How the first rank asks for the others."""

    num_ranks: int
    port: int
    timeout_s: float


def parsed_call(message: bytes) -> RanksCall | None:
    """A call; None for anything else: code of the user's may have written to all descriptors of its process."""
    try:
        fields = json.loads(message)
        call = RanksCall(**{name: fields[name] for name in RanksCall.__dataclass_fields__})
    except (ValueError, TypeError, KeyError):
        return None
    is_sound = type(call.num_ranks) is int and type(call.port) is int and isinstance(call.timeout_s, int | float)
    return call if is_sound and 1 <= call.num_ranks <= MOST_RANKS else None


@dataclass
class Member:
    """A rank's process that hasn't ended."""

    rank: int
    pid: int
    ended_by: str | None = None  # the last signal that we sent because another rank had ended: "term" or "kill"
    is_stopped: bool = False  # whether it was stopped, as after Ctrl-Z, when we killed it


class Supervisor:
    """Starts, watches and ends the processes of one point."""

    def __init__(self, request: dict[str, Any], parent: socket.socket) -> None:
        self.ended: list[dict[str, Any]] = []  # in the order of their ends
        self.parent_is_there = True
        self._request, self._parent = request, parent
        self._alive: dict[int, Member] = {}  # by pidfd
        self._deadline: float | None = None  # time.monotonic() at which processes that still run are killed
        self._grace_s = ORPHAN_GRACE_S
        self._late_s: float | None = None  # see `_first_late_s`
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(self, outlets: Outlets, held: Sequence[int]) -> None:
        """Run the first rank and those that it asks for to their end. Closes the descriptors in this process."""
        self._outlets = outlets
        with self._ours, self._theirs:
            self._fork(RankPlace(0, self._theirs, tuple(held)))
            for fd in held:
                os.close(fd)
            while self._alive:
                self._watch()
        os.close(outlets.printed)
        os.close(outlets.events)

    def _fork(self, place: RankPlace) -> None:
        server = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # so that none is lost before the child has its handlers
        try:
            pid = os.fork()
        except OSError:  # a limit on processes, or no memory
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            self.ended.append(
                {"rank": place.rank, "status": EXIT_NOT_FORKED << 8, "ended_by": None, "is_stopped": False}
            )
            self._let_follow(EXIT_NOT_FORKED)
            return
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            self._alive[os.pidfd_open(pid)] = Member(place.rank, pid)
            return
        code = EXIT_ORPHANED
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:  # else the server died before prctl, so that no signal will come
                self._parent.close()
                self._ours.close()
                worker = importlib.import_module(WORKER)
                code = worker.main(self._request, self._outlets, place)
        finally:
            os._exit(code)  # no destructors, no atexit: milliseconds instead of half a second

    def _watch(self) -> None:
        """Wait for the next event, and react to it."""
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        listening = [*self._alive, self._ours, self._parent] if self.parent_is_there else [*self._alive, self._ours]
        ready = set(select.select(listening, [], [], left_s)[0])
        for fd in ready & self._alive.keys():  # note all ends first, before a rank is signalled because of another one
            self._note_end(fd)
        if self._ours in ready and self._alive:
            self._call_others()
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

    def _call_others(self) -> None:
        """Fork the other ranks."""
        message, held, _, _ = socket.recv_fds(self._ours, 4096, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        called = parsed_call(message)
        num_ranks = called.num_ranks if called else 1
        self._grace_s = called.timeout_s if called else self._grace_s
        for rank in range(1, num_ranks):
            about = {"held": tuple(held), "num_ranks": num_ranks, "port": called.port if called else 0}
            self._fork(RankPlace(rank, **about))
        for fd in held:
            os.close(fd)

    def _obey(self) -> None:
        """Pass a message of the parent on to all ranks."""
        message = self._parent.recv(64)
        for member in self._alive.values():
            os.kill(member.pid, signal.SIGKILL if message == KILL else signal.SIGTERM)
        if not message:
            self.parent_is_there = False
            self._end_within(ORPHAN_GRACE_S)
