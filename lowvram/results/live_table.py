"""The table of a sweep while it runs. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from lowvram.results import table

REST = 20.0  # pause between two tables, in multiples of the time that the last one took


@final
class LiveTable:
    """Rebuilds the table from all rows when points end, but spends at most a twentieth of the time on it: in a long
    sweep, rebuilding it after every point could take longer than the points."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")

    def save(self, folder: Path) -> None:
        """Saves the table of a sweep's folder, unless it is too early. It is saved again at the end of a sweep."""
        begin_s = self._clock()
        if begin_s < self._next_s:
            return
        with suppress(OSError):  # a full disk costs the table, not the points to come
            table.save(folder, table.collect(folder))
        end_s = self._clock()
        self._next_s = end_s + REST * (end_s - begin_s)
