"""What the jobs of one process share: a fork server, plans made ahead, and the live table. Results are on disk, not
here. Imports no torch.
"""

from __future__ import annotations

import atexit
import logging
import sys
from functools import cached_property
from typing import final

from lowvram.cli import launchers
from lowvram.launch.client import Server
from lowvram.launch.stop import stop_signals
from lowvram.launch.streams import protect_streams
from lowvram.planning.client import Plans
from lowvram.results.live_table import LiveTable
from lowvram.results.terminal import Progress, QuietProgress


@final
class Here:
    """Shared by the jobs of the program, or of a launcher's process. Each attribute is created at its first use."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @cached_property
    def server(self) -> Server:
        return Server()

    @cached_property
    def plans(self) -> Plans:
        return Plans(self.server, self.progress, stop_signals)

    @cached_property
    def table(self) -> LiveTable:
        return LiveTable()

    def stop(self) -> None:
        """Stop the server; no job may follow."""
        if "server" in vars(self):
            self.server.stop()


def joined() -> Here:
    """Set up a process that a launcher has started, as the program was: a broken output doesn't end it, and signals are
    only counted."""
    logging.raiseExceptions = False
    protect_streams()
    launchers.join()
    here = Here(QuietProgress(sys.stdout))
    atexit.register(here.stop)
    return here
