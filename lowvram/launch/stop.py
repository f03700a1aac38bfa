"""Counts requests to stop, and decides when the processes of a point must end. Imports no torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lowvram.launch.last_resort import last_resort
from lowvram.launch.native_log import NativeLogs
from lowvram.launch.supervisor import KILL, STOPS, TERM

TIMEOUT_GRACE_S = 5.0  # from SIGTERM at the time limit to SIGKILL: a snapshot may still be saved


@final
class SignalCount:
    """How often this process was asked to stop: by signals, or by the program that started it, through a file."""

    def __init__(self) -> None:
        self.num = 0
        self._stops_file: Path | None = None  # to which that program appends a byte for each request

    def listen(self, stops_file: Path | None = None) -> None:
        """Only count signals from here on, so that none interrupts a write."""
        self.num, self._stops_file = 0, stops_file
        for number in STOPS:
            signal.signal(number, self.add)

    def add(self, number: int, frame: Any = None) -> None:
        if number != signal.SIGHUP or not self.num:  # a shell repeats what the terminal has told: it is one request
            self.num += 1

    def __call__(self) -> int:
        try:  # not the sum: a signal to the whole process group arrives both ways
            return self.num if self._stops_file is None else max(self.num, self._stops_file.stat().st_size)
        except OSError:  # the program is gone
            return self.num


stop_signals = SignalCount()  # one per process, as signal handlers are


@final
class StopConditions:
    """Whether a point must end: because of a request to stop, or its time limit. Called repeatedly while the point
    runs; returns each order, TERM or KILL, once, else None."""

    def __init__(self, timeout_s: float | None, stop_signals: Callable[[], int]) -> None:
        self._timeout_s, self._stop_signals = timeout_s, stop_signals
        self._began = time.monotonic()
        self._given: set[bytes] = set()

    @property
    def late_s(self) -> float | None:
        """When the time is up, as time.monotonic() tells it; None: never."""
        return None if self._timeout_s is None else self._began + self._timeout_s

    @property
    def is_stopped(self) -> bool:
        return self._stop_signals() > 0

    @property
    def how_stopped(self) -> str:
        """The reason in the row of a point that could not report it itself."""
        return f"{'killed by a second signal' if KILL in self._given else 'stopped'} before it could save"

    @property
    def is_timed_out(self) -> bool:
        return self._timeout_s is not None and time.monotonic() - self._began > self._timeout_s

    def __call__(self) -> bytes | None:
        order = self._due()
        if order is None or order in self._given:
            return None
        self._given.add(order)
        return order

    def _due(self) -> bytes | None:
        if self._stop_signals() > 1:
            return KILL
        if self._timeout_s is not None and time.monotonic() - self._began > self._timeout_s + TIMEOUT_GRACE_S:
            return KILL
        return TERM if self.is_stopped or self.is_timed_out else None

    @property
    def how_late(self) -> str:
        """The reason in the row of a point whose time is up."""
        return f"still running after timeout_s={self._timeout_s:g}"


@dataclass(frozen=True)
class Watch:
    """Orders for the processes of a point, called repeatedly while they run. Bounds their logs, and shows that this
    thread isn't blocked."""

    stop_conditions: StopConditions
    logs: NativeLogs

    def __call__(self) -> bytes | None:
        last_resort.hear()
        self.logs.look()
        return self.stop_conditions()
