"""Sends rows of `metrics.jsonl` to the parent. A snapshot carries the rows that aren't on disk yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from lowvram.loops.session import Events

MOST_UNCONFIRMED = 256  # rows, after which they are committed, also in a run without snapshots


@final
class Journal:
    """Sends rows, and keeps those that the parent hasn't confirmed to be on disk, for the next snapshot."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.unconfirmed: list[dict[str, Any]] = []

    def restore(self, carried: Sequence[dict[str, Any]]) -> None:
        """Take over the rows that a snapshot carried: they are sent when the run begins."""
        self.unconfirmed = list(carried)

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send one row."""
        self.unconfirmed.append({"step": step, **values})
        self._events("metrics", step=step, values=values)
        if len(self.unconfirmed) % MOST_UNCONFIRMED == 0:
            self.commit()

    def commit(self) -> list[dict[str, Any]]:
        """Wait until all rows are on disk; returns those that may not be, because the parent is gone or slow."""
        if self._events.commit():
            self.unconfirmed = []
        return self.unconfirmed
