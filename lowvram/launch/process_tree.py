"""Processes and what they have started, by their ids. Imports no torch."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process stands still because of a signal, as after Ctrl-Z. One that is gone doesn't."""
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads, that it has not yet waited for."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            pids += map(int, file.read_text().split())
    return pids


def kill_all(pid: int) -> None:
    """End a child of ours with all that it has started, in whatever state they are.

    Each is stopped before it is asked for its children, so that none can start or wait for another meanwhile: an id
    stays that of the same process until it is killed.
    """
    for process in stopped(pid):
        signal_if_there(process, signal.SIGKILL)


def stopped(pid: int) -> list[int]:
    """Stop a process and all below it; returns their ids."""
    signal_if_there(pid, signal.SIGSTOP)
    return [pid, *(below for child in children(pid) for below in stopped(child))]


def signal_if_there(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
