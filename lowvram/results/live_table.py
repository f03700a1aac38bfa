"""The table of a sweep while it runs. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from lowvram.results import table

REST = 20.0  # times as long as a table took, none is made


@final
class LiveTable:
    """Rebuilt from all rows after a point, but not after each: the more rows, the longer it takes, so that in a long
    sweep it would take more time than the points. It takes at most a twentieth."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")

    def save(self, folder: Path) -> None:
        """Of a sweep's folder. The end of a sweep saves it once more, with all rows."""
        begin_s = self._clock()
        if begin_s < self._next_s:
            return
        with suppress(OSError):  # a full disk costs the table, not the points to come
            table.save(folder, table.collect(folder))
        end_s = self._clock()
        self._next_s = end_s + REST * (end_s - begin_s)
