"""Limits on processes and threads, which containers and batch systems set: no memory is missing where they are reached.
Imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import traceback
from contextlib import suppress
from pathlib import Path

from lowvram.config.texts import message

# What Python, libgomp, OpenBLAS, torch and C++ say.
WORDS = "thread creation failed|can't start new thread|pthread_create failed|(?:unable|failed) to create thread"
# The system's word for it, which sockets and files that don't block get as well: it counts only from what starts a
# process or a thread, as its message or its line in a traceback says, and as all that an error of C++ says.
AGAIN = re.escape(os.strerror(errno.EAGAIN))
STARTS = (
    r"\b(?:v?fork|clone3?|pthread_create)\b|thread creation|(?:create|start|spawn)\w* .*thread|ThreadPoolBuild|OMP:"
)
CALLS = r"(?:fork|spawn|child_exception_type)\w*\("
SAYS_SO = re.compile(
    rf"{WORDS}|(?:{STARTS}).*{AGAIN}|std::system_error'?\s+what\(\):\s+{AGAIN}"
    rf"|{CALLS}.*\n(?: {{4}}.*\n)*\w*Error: .*{AGAIN}|^RuntimeError: {AGAIN}$",
    re.IGNORECASE | re.MULTILINE,
)
PIDS = ("sys/fs/cgroup/{}/pids.max", "sys/fs/cgroup/pids/{}/pids.max")  # of both versions of cgroups


def says_so(text: str) -> bool:
    """Whether a text, of an error or of a log, says that no thread or process could be started."""
    return SAYS_SO.search(text) is not None


def is_cause_of(error: BaseException) -> bool:
    """Whether an error was raised because no thread or process could be started."""
    is_systems = isinstance(error, OSError) and error.errno == errno.EAGAIN
    lines = [f"    {frame.line}\n" for frame in traceback.extract_tb(error.__traceback__)[-1:]] if is_systems else []
    return says_so(f"{''.join(lines)}{type(error).__name__}: {message(error)}")


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
