"""Threads that get no memory to begin with, and the private name of Python's threading that tells. Imports no torch."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from threading import Event, Thread

CHECK_S = 0.2
PYTHONS = Thread.start


def start_or_fail() -> None:
    """From now on a thread's `start` raises MemoryError if the new thread gets no memory to begin with.

    threading.Thread.start, since 2.6, which waits for it for ever. Replaced by nothing, once Python's own raises then.
    """

    def tasks() -> set[str] | None:
        """The threads of this process, as the system numbers them; None where it doesn't tell."""
        try:
            return {task.name for task in Path("/proc/self/task").iterdir()}
        except OSError:
            return None

    def wait_for(event: Event, known: set[str]) -> None:
        """Wait until a thread has begun; its own task is none of those that are known."""
        while not Event.wait(event, CHECK_S):
            found = tasks()
            if found is not None and found <= known and not event.is_set():
                raise MemoryError("a thread has got no memory to begin with")

    def start(thread: Thread) -> None:
        event, known = started_event(thread), tasks()
        attributes = vars(event)
        if known is not None:
            attributes["wait"] = partial(wait_for, event, known)
        try:
            PYTHONS(thread)
        finally:
            attributes.pop("wait", None)

    threading.Thread.start = start  # pyright: ignore[reportAttributeAccessIssue]


def started_event(thread: Thread) -> Event:
    """What `Thread.start` waits for: that the new thread has begun.

    threading.Thread._started, since 2.6: `start` waits for it for ever where the new thread got no memory to begin
    with. Replaced by nothing, once Python's own raises then.
    """
    return thread._started  # pyright: ignore[reportAttributeAccessIssue]
