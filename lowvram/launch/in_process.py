"""process=inline: the program itself is the process of its one point, for debuggers and profilers. Imports no torch
before it is used.

What `Server` does for points in children, without a fork: the same events come, and the same row is left.
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
    """Runs one request, here."""

    disturbs = "process=inline: peaks and times are those of the whole program"
    is_fresh = False  # nothing can begin again where something has run

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the exception that ended the point, if it was unexpected

    def stop(self) -> None:
        """Nothing runs beside."""

    def wait_until_ready(self, order: Callable[[], bytes | None]) -> None:
        """Until torch is imported."""
        os.environ |= {**LIBRARIES, **os.environ}  # as in the fork server's children
        importlib.import_module(WORKER)

    def run(
        self, request: dict[str, Any], on_event: Listener, order: Callable[[], bytes | None], held: Sequence[int] = ()
    ) -> list[Ending] | None:
        """As `Server.run`. Signals and the time limit reach the point itself, so `order` is not asked; what is `held`
        is open in this process as it is."""
        self.wait_until_ready(order)
        self.error = importlib.import_module(WORKER).run_here(request, on_event)
        return [{"rank": 0, "status": 0, "ended_by": None, "is_stopped": False}]
