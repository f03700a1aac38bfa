"""Waits for what another machine has written: a network's file system may show it seconds late. Imports no torch.

A machine keeps for a while what it knows of a folder: NFS up to 60 s (acdirmax), others as long as they like. So what
must be there, as a job or another rank has told, is looked for again before it counts as missing. On a disk of this
machine's there is nothing to wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

LATE_S = 60.0
FIRST_S, LONGEST_S = 0.05, 1.0  # between two looks
MOUNTS = Path("/proc/self/mountinfo")
# File systems that no other machine writes; of any other somebody does.
LOCAL = frozenset(("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "jfs", "ntfs3"))
LOCAL |= {"overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ufs", "vfat", "xfs", "zfs"}


def is_shared(folder: Path) -> bool:
    """Whether other machines may write in a folder, told by its file system."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116  # which is what the table has
        lines = [line.split(" - ") for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {about[1].split()[0] for about in lines if about[0].split()[2] == number}
    return bool(kinds) and kinds.isdisjoint(LOCAL)


def is_there_in_time(is_there: Callable[[], bool], folders: Iterable[Path], until_s: float | None = None) -> bool:
    """Whether something is there, if it may be seen late after a wait.

    Args:
        folders: those in which it must show itself. They are listed before each look, which makes the machine ask.
        until_s: when to give up, as time.monotonic() tells it; None: `LATE_S` from now on.
    """
    folders, pause_s = list(folders), FIRST_S
    until_s = time.monotonic() + LATE_S if until_s is None else until_s
    while not is_there():
        if time.monotonic() >= until_s or not any(map(is_shared_or_above, folders)):
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
        for folder in folders:
            with suppress(OSError):
                os.listdir(folder)  # noqa: PTH208
    return True


def is_shared_or_above(folder: Path) -> bool:
    """The same of a folder that isn't seen yet, told by the lowest one above it that is."""
    return is_shared(next(path for path in (folder, *folder.parents) if path.exists()))
