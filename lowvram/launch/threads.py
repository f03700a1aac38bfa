"""Threads that get no memory to begin with. Imports no torch."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from threading import Event, Thread

from lowvram.compat.threads import started_event

CHECK_S = 0.2
PYTHONS = Thread.start


def start_or_fail() -> None:
    """From now on a thread's `start` raises MemoryError if the new thread gets no memory to begin with."""
    threading.Thread.start = started  # pyright: ignore[reportAttributeAccessIssue]


def started(thread: Thread) -> None:
    """`Thread.start`."""
    event, known = started_event(thread), tasks()
    attributes = vars(event)
    if known is not None:
        attributes["wait"] = partial(wait_for, event, known)
    try:
        PYTHONS(thread)
    finally:
        attributes.pop("wait", None)


def wait_for(event: Event, known: set[str]) -> None:
    """Wait until a thread has begun; its own task is none of those that are known."""
    while not Event.wait(event, CHECK_S):
        found = tasks()
        if found is not None and found <= known and not event.is_set():
            raise MemoryError("a thread has got no memory to begin with")


def tasks() -> set[str] | None:
    """The threads of this process, as the system numbers them; None where it doesn't tell."""
    try:
        return {task.name for task in Path("/proc/self/task").iterdir()}
    except OSError:
        return None
