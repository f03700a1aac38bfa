"""Processes and what they have started, by their ids. Imports no torch."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as after Ctrl-Z; False if it is gone."""
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The children of a process (of all its threads) that it hasn't waited for yet."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            pids += map(int, file.read_text().split())
    return pids


def stop_with_parent() -> None:
    """Ask this process to stop as soon as its parent has ended, however it did.

    A thread waits for it: the kernel's own signal (PR_SET_PDEATHSIG) comes once for each thread of the parent, and a
    second request to stop means at once.
    """
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def kill_all(pid: int) -> None:
    """Kill a child of ours and all its descendants, in whatever state they are.

    Each one is stopped before its children are listed, so that it can neither start another one nor reap one: each id
    then belongs to the same process until we kill it.
    """
    for process in stopped(pid):
        signal_if_there(process, signal.SIGKILL)


def stopped(pid: int) -> list[int]:
    """Stop a process and all its descendants; returns their ids."""
    signal_if_there(pid, signal.SIGSTOP)
    return [pid, *(below for child in children(pid) for below in stopped(child))]


def signal_if_there(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
