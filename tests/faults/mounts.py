"""Small file systems in memory, which only this process and its children see, so that none outlives them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 0x4000, 0x40000
MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def become_private() -> bool:
    """Whether this process may mount; from here on nobody else sees what it mounts."""
    if libc.unshare(CLONE_NEWNS):
        return False
    return not libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def mount(folder: Path, options: str, flags: int = 0) -> None:
    """Mount a tmpfs with these options, such as size=64k; MS_REMOUNT: change those of one that is there."""
    call(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode()))


def bind(folder: Path, place: Path) -> None:
    call(libc.mount(os.fsencode(folder), os.fsencode(place), None, MS_BIND, None))


def move(folder: Path, place: Path) -> None:
    call(libc.mount(os.fsencode(folder), os.fsencode(place), None, MS_MOVE, None))


def unmount_below(folder: Path) -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place = line.split()[1]
        if Path(place).is_relative_to(folder):
            libc.umount2(os.fsencode(place), MNT_DETACH)


def call(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
