"""Makes stdout and stderr safe: neither unencodable text nor a closed pipe ends the program. Imports nothing slow."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

STDERR = 2


def protect_streams() -> None:
    """Replace stdout and stderr by streams that discard their output after a closed pipe or a full disk."""
    fill_descriptors()
    sys.stdout, sys.stderr = protected(sys.stdout), protected(sys.stderr)


def fill_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed, as after `>&-`: else the next file or socket would get
    their numbers, and be written to as if it were a terminal."""
    for fd in range(STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != fd:
                os.dup2(nowhere, fd)
                os.close(nowhere)
            os.set_inheritable(fd, True)


def protected(stream: TextIO | None) -> TextIO:
    """A stream over the same descriptor that escapes what its encoding lacks, and survives a closed pipe, as in
    `python train.py | head`. For None, as in `python train.py >&-`, a stream that discards its text."""
    if stream is None:
        return Path(os.devnull).open("w", errors="backslashreplace")
    outlet = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(outlet, stream.encoding, "backslashreplace", line_buffering=True)


class Outlet(io.FileIO):
    """A file descriptor that discards its output once its pipe is closed or its disk is full."""

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
