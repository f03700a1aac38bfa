"""Signals that ask a point to stop: during a step they take effect at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignals:
    """Whether a stop was requested (`requested`), and whether a first signal must not interrupt now (`_patient`)."""

    def __init__(self) -> None:
        self.requested = self._patient = False
        self._pid = os.getpid()

    def heard(self, number: int) -> bool:
        """Note a signal; returns whether it is the first one."""
        if os.getpid() != self._pid:  # in a data loader's worker, which has inherited the handler
            os._exit(128 + number)
        first, self.requested = not self.requested, True
        return first

    @contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        """Inside it a first signal only sets `requested`, which the loop checks between steps."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
