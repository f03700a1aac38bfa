"""What a point does about signals that ask it to stop: within a step they wait for its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignals:
    """Whether somebody asked to stop, and whether a first one has to wait."""

    def __init__(self) -> None:
        self.requested = self._patient = False
        self._pid = os.getpid()

    def heard(self, number: int) -> bool:
        """Take note of a signal; returns whether it is the first."""
        if os.getpid() != self._pid:  # a loader's worker inherited the handler
            os._exit(128 + number)
        first, self.requested = not self.requested, True
        return first

    @contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        """Inside the block a first signal waits: who runs the steps asks for `requested` between them."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
