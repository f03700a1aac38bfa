"""How much memory the host could still give to this process."""

from __future__ import annotations

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
    return max(0, min([available, *map(left_in, limited_cgroups(root))]))


def limited_cgroups(root: Path) -> Iterator[Path]:
    """The folders of the process's cgroup and of those around it that have a limit (version 2:
    https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
    mounted, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        if line.startswith("0::"):
            inner = mounted / line.removeprefix("0::").lstrip("/")
            for folder in [inner, *inner.parents]:
                limit = folder / "memory.max"
                if folder.is_relative_to(mounted) and limit.exists() and limit.read_text().strip() != "max":
                    yield folder


def left_in(cgroup: Path) -> int:
    """What a limit leaves. Cached files don't count: the kernel drops them before it refuses memory."""
    counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.current").read_text()) - int(counts["inactive_file"])
    return int((cgroup / "memory.max").read_text()) - used
