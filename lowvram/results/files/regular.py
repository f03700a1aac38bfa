"""Reads files that somebody else may have made: regular ones only, of a limited size. A pipe would stop the reader for
ever, and a device such as /dev/zero never ends. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SHORT_BYTES = 2**20  # of a file that describes something in a few lines
GROWTH_BYTES = 2**16  # by which a file may grow while it is read
LONG_BYTES = 2**26  # of one with an entry for each file or tensor of a large model
NUM_TRIES = 5  # to read a file that other machines replace meanwhile
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class Irregular(OSError):
    """A file that isn't read because of what it is, or because of its size."""


def open_regular(path: Path, most_bytes: int | None = None) -> io.BufferedReader:
    """Open a file to read it, at once whatever it is. Links are followed.

    Args:
        most_bytes: what it may hold; None: any size.

    Raises:
        OSError: it can't be opened.
        Irregular: it is no regular file, or is larger.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            what = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise Irregular(errno.EINVAL, f"it is {what}, no regular file", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            what = f"it is too large: {status.st_size:,} bytes, at most {most_bytes:,} are read"
            raise Irregular(errno.EFBIG, what, str(path))
        os.set_blocking(fd, True)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def unless_stale(read: Callable[[], T]) -> T:
    """What `read` returns, which opens a file by its name and reads it. Where another machine replaces the file
    meanwhile, NFS knows the old one no more (ESTALE): `read` is called again, and finds the new one."""
    for _ in range(NUM_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """The bytes of a file; one that grows meanwhile is read up to `most_bytes`. Raises OSError as `open_regular`."""

    def read() -> bytes:
        with open_regular(path, most_bytes) as file:
            if most_bytes is None:
                return file.read()
            # Not `most_bytes`: as much memory would be allocated, whatever the file's size.
            return file.read(min(most_bytes, os.fstat(file.fileno()).st_size + GROWTH_BYTES))

    return unless_stale(read)


def read_dated(path: Path, most_bytes: int) -> tuple[bytes, int]:
    """The bytes of a file, and when it was last changed, in ns. Raises OSError as `open_regular`."""

    def read() -> tuple[bytes, int]:
        with open_regular(path, most_bytes) as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns

    return unless_stale(read)


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raises OSError, as `open_regular`, for a file that a library is to read."""
    unless_stale(lambda: open_regular(path, most_bytes).close())


def fingerprint(path: Path) -> str:
    """The first 64 bits of the SHA-256 of a file, as 16 hex digits. Raises OSError as `open_regular`."""

    def hashed() -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    return unless_stale(hashed)
