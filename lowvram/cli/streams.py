"""The output of a program takes any text, and whether or not somebody reads it. Imports nothing that takes time."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

STDERR = 2


def outlasting() -> None:
    """From here on no text and no reader of the output can end the program."""
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)


def lasting(stream: TextIO | None) -> TextIO:
    """The same stream, which takes any text, whatever its encoding, and stays usable when nobody reads it any more, as
    in `python train.py | head`; one that goes nowhere for none at all, as in `python train.py >&-`."""
    if stream is None:
        return Path(os.devnull).open("w", errors="backslashreplace")
    outlet = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(outlet, stream.encoding, "backslashreplace", line_buffering=True)


class Outlet(io.FileIO):
    """A file descriptor. Once nobody reads it, or its disk is full, what is written goes nowhere."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self._tell(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)

    def _tell(self, error: OSError) -> None:
        """On stderr, unless that is what can't be written."""
        if self.fileno() != STDERR:
            with suppress(OSError):
                os.write(STDERR, f"stdout can't be written ({error.strerror}): the run goes on without it\n".encode())
