"""What native code prints, also when it crashes: one file per rank, of bounded size. Imports no torch.

The file is the process's stderr, so that a crash can still write to it. The parent limits its size: it cuts the middle
out of a file that is too long.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import final

LARGEST_BYTES = 2**20
KEPT_BYTES = 2**18  # at the beginning, and as many at the end
LOOK_S = 1.0


def native_log(rank: int) -> str:
    """The name of a rank's file."""
    return f"native.{rank}.log" if rank else "native.log"


@final
class NativeLogs:
    """The files of one point, while its processes append to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_cut: dict[Path, int] = {}  # bytes
        self._next_look = 0.0

    def look(self) -> None:
        """Cut long files, at most every `LOOK_S`."""
        if time.monotonic() >= self._next_look:
            self.cut()
            self._next_look = time.monotonic() + LOOK_S

    def cut(self) -> None:
        """Cut the files that are too long."""
        for path in (*self._folder.glob("native.log"), *self._folder.glob("native.*.log")):
            with suppress(OSError):  # a failure here must not end the point
                fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    self._cut(path, fd)
                finally:
                    os.close(fd)

    def _cut(self, path: Path, fd: int) -> None:
        """Cut the middle out. What the process appends meanwhile ends up after the rest, or is lost."""
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size <= LARGEST_BYTES:
            return
        end = os.pread(fd, KEPT_BYTES, about.st_size - KEPT_BYTES)
        self._num_cut[path] = self._num_cut.get(path, 0) + about.st_size - 2 * KEPT_BYTES
        os.ftruncate(fd, KEPT_BYTES)
        os.write(fd, f"\n... lowvram has cut {self._num_cut[path]:,} bytes here ...\n".encode() + end)
