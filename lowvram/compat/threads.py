"""A private name of Python's threading."""

from __future__ import annotations

from threading import Event, Thread


def started_event(thread: Thread) -> Event:
    """What `Thread.start` waits for: that the new thread has begun.

    threading.Thread._started, since 2.6: `start` waits for it for ever where the new thread got no memory to begin
    with. Replaced by nothing, once Python's own raises then.
    """
    return thread._started  # pyright: ignore[reportAttributeAccessIssue]
