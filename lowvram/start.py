"""The start of the program: what holds before anything slow is imported, and whether or not somebody listens."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

EXIT_INTERRUPTED = 75


def main() -> None:
    """`python train.py …` and `lowvram …`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)  # until the command line listens itself
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    from lowvram.cli import main as command_line  # a third of a second

    command_line()


def end_at_once(number: int, frame: Any) -> None:
    """Nothing has begun: there is nothing to save."""
    os.write(2, b"interrupted before anything began\n")
    os._exit(EXIT_INTERRUPTED)


def lasting(stream: TextIO | None) -> TextIO:
    """The same stream, which stays usable when nobody reads it any more, as in `python train.py | head`; one that goes
    nowhere for none at all, as in `python train.py >&-`."""
    if stream is None:
        return Path(os.devnull).open("w")
    outlet = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(outlet, stream.encoding, stream.errors, line_buffering=True)


class Outlet(io.FileIO):
    """A file descriptor. Once nobody reads it, what is written goes nowhere."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
