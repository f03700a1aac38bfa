"""How much memory the host could still give to this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def free_host_bytes(root: Path = Path("/")) -> int:
    """What the kernel could give to processes (MemAvailable), or less: what the limits of this one's cgroups leave,
    those of a container or a batch job.

    Args:
        root: the folder in which /proc and /sys are.
    """
    (line,) = [line for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    available = int(line.split()[1]) * 1024
    return int(max(0, min([available, *map(left_in, cgroups(root))])))


def cgroups(root: Path) -> Iterator[Path]:
    """The folders of the process's cgroup and of those around it, if the kernel counts by version 2
    (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
    mounted, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        if line.startswith("0::"):
            inner = mounted / line.removeprefix("0::").lstrip("/")
            for folder in [inner, *inner.parents]:
                if folder.is_relative_to(mounted) and ".." not in folder.parts:
                    yield folder


def left_in(cgroup: Path) -> float:
    """What a limit leaves; infinity if there is none, or its files can't be read. Cached files don't count: the kernel
    drops them before it refuses memory."""
    try:
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(counts[name]) for name in ("inactive_file", "active_file"))
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError, KeyError):  # `max` is no number
        return math.inf
    return limit - used + cached
