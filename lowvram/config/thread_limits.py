"""Limits on processes and threads, which containers and batch systems set: no memory is missing where they are reached.
Imports no torch.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

# What Python, libgomp, OpenBLAS, torch and C++ say, in lower case.
WORDS = ("thread creation failed", "can't start new thread", "pthread_create failed", "unable to create thread")
WORDS += ("failed to create thread", os.strerror(errno.EAGAIN).lower())
PIDS = ("sys/fs/cgroup/{}/pids.max", "sys/fs/cgroup/pids/{}/pids.max")  # of both versions of cgroups


def says_so(text: str) -> bool:
    """Whether a message says that no thread or process could be started."""
    text = text.lower()
    return any(word in text for word in WORDS)


def limits(root: Path = Path("/")) -> str:
    """What is wrong, with the limits that hold for this process; the smaller of several cgroups' counts.

    Args:
        root: the folder in which /proc and /sys are.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    of_user = [] if soft == resource.RLIM_INFINITY else [f"ulimit -u is {soft}, for all processes of this user"]
    counts = list(pids_max(root))
    of_group = [f"pids.max of this container or job is {min(counts)}"] if counts else []
    known = "; ".join([*of_user, *of_group]) or "see ulimit -u, pids.max and ulimit -v"
    return f"no further process or thread may be started ({known})"


def pids_max(root: Path) -> list[int]:
    """The limits of this process's cgroup and of those around it."""
    found = list[int]()
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            inner = Path(line.rpartition(":")[2].lstrip("/"))
            for group in (inner, *inner.parents) if ".." not in inner.parts else ():
                for pattern in PIDS:
                    with suppress(OSError, ValueError):  # `max` is no number
                        found.append(int((root / pattern.format(group)).read_text()))
    return found
