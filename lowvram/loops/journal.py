"""Sends rows of `metrics.jsonl` to the parent. A snapshot carries the rows that aren't on disk yet, and a mark of every
row up to its step, so that lines that are lost later are noticed."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, final

import torch

from lowvram.loops.session import Events
from lowvram.results.metric_lines import mark_of

MOST_UNCONFIRMED = 256  # rows, after which they are committed, also in a run without snapshots


def as_row(step: int, **values: float) -> dict[str, Any]:
    """A row of a snapshot. Raises TypeError if it is none."""
    if not all(isinstance(value, int | float) for value in values.values()):
        raise TypeError(f"a row of other things than numbers: {values}")
    return {"step": index(step), **values}


@final
class Journal:
    """Sends rows, and keeps those that the parent hasn't confirmed to be on disk, for the next snapshot."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.unconfirmed: list[dict[str, Any]] = []
        self.marks: list[list[int]] = []  # of all rows of the run

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a snapshot carries: its unconfirmed rows are sent when the run begins. A snapshot of an early
        version of lowvram carries neither."""
        self.unconfirmed = [as_row(**row) for row in state.get("untold", ())]
        marks = state.get("marks")
        self.marks = [] if marks is None else [[index(step), name, line] for step, name, line in marks.tolist()]

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send one row."""
        row = {"step": step, **values}
        self.unconfirmed.append(row)
        self.marks.append(mark_of(row))
        self._events("metrics", step=step, values=values)
        if len(self.unconfirmed) % MOST_UNCONFIRMED == 0:
            self.commit()

    def commit(self) -> list[dict[str, Any]]:
        """Wait until all rows are on disk; returns those that may not be, because the parent is gone or slow."""
        if self._events.commit():
            self.unconfirmed = []
        return self.unconfirmed

    def state(self) -> dict[str, Any]:
        """What a snapshot carries, after `commit`."""
        return {"untold": self.commit(), "marks": torch.tensor(self.marks, dtype=torch.int64)}
