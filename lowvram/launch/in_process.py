"""process=inline: one point runs in the program's own process, for debuggers and profilers. Imports torch only when it
is used.

`Inline` takes the place of `Server`, with the same events and the same row.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, final

from lowvram.launch.client import LIBRARIES, Ending
from lowvram.launch.protocol import Listener

WORKER = "lowvram.worker.in_process"  # started by its name: it imports torch


@final
class Inline:
    """Runs one request in this process."""

    disturbs = "process=inline: peaks and times are those of the whole program"
    is_fresh = False  # so a point can't be repeated: a repetition needs a new process

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the exception that ended the point, if it was unexpected

    def stop(self) -> None:
        """Nothing to stop: there is no other process."""

    def wait_until_ready(self, order: Callable[[], bytes | None]) -> None:
        """Import torch."""
        os.environ |= {**LIBRARIES, **os.environ}  # as in the fork server's children
        importlib.import_module(WORKER)

    def run(
        self, request: dict[str, Any], on_event: Listener, order: Callable[[], bytes | None], held: Sequence[int] = ()
    ) -> list[Ending] | None:
        """As `Server.run`, except that `order` and `held` aren't used: signals and the time limit reach the point
        directly, and this process has the descriptors open anyway."""
        self.wait_until_ready(order)
        self.error = importlib.import_module(WORKER).run_here(request, on_event)
        return [{"rank": 0, "status": 0, "ended_by": None, "is_stopped": False}]
