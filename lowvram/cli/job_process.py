"""What the jobs of one process share: a fork server, plans that are ahead of their points, a table that grows. None of
it is a result: those are on disk. Imports no torch.
"""

from __future__ import annotations

import atexit
import logging
import sys
from functools import cached_property
from typing import final

from lowvram.cli import launchers
from lowvram.cli.streams import outlasting
from lowvram.launch.client import Server
from lowvram.launch.stop import stop_signals
from lowvram.planning.client import Plans
from lowvram.results.live_table import LiveTable
from lowvram.results.terminal import Progress, QuietProgress


@final
class JobProcess:
    """Of the program itself, or of a process that a launcher has started. Each is made when it is first used."""

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
        if "server" in vars(self):
            self.server.stop()


_this: list[JobProcess] = []


def this() -> JobProcess:
    """That of this process."""
    if not _this:
        joined()
    return _this[0]


def begin(progress: Progress) -> JobProcess:
    """Of the program; `end` must follow."""
    _this[:] = [JobProcess(progress)]
    return _this[0]


def end() -> None:
    """Nothing runs any more, nor will."""
    for process in _this:
        process.stop()
    _this.clear()


def joined() -> None:
    """A launcher has started this process: as in the program, nothing that becomes of the output ends it, and signals
    only count."""
    logging.raiseExceptions = False
    outlasting()
    launchers.join()
    begin(QuietProgress(sys.stdout))
    atexit.register(end)
