"""The rows of `metrics.jsonl` on their way to the parent, so that no snapshot is ahead of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from lowvram.loops.session import Events

MOST_UNCONFIRMED = 256  # a run without snapshots doesn't keep them all


@final
class Journal:
    """Tells rows, and keeps those that the parent hasn't confirmed to be on the disk: a snapshot carries them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.unconfirmed: list[dict[str, Any]] = []

    def restore(self, carried: Sequence[dict[str, Any]]) -> None:
        """What a snapshot has carried: told when the run begins, and confirmed like any other."""
        self.unconfirmed = list(carried)

    def tell(self, step: int, values: dict[str, float]) -> None:
        """One row."""
        self.unconfirmed.append({"step": step, **values})
        self._events("metrics", step=step, values=values)
        if len(self.unconfirmed) % MOST_UNCONFIRMED == 0:
            self.commit()

    def commit(self) -> list[dict[str, Any]]:
        """Have all rows brought to the disk; returns those of which that is uncertain: the parent is gone, or slow."""
        if self._events.commit():
            self.unconfirmed = []
        return self.unconfirmed
