"""What is in the folder of a run or of a sweep: the files that are ours, and what they say. Imports no torch.

claim.py takes such a folder for one program.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from enum import Enum
from pathlib import Path

from lowvram.config.errors import BadInput
from lowvram.results import row as rows
from lowvram.results.files.marker import MARKER, owner_of, read_marker
from lowvram.results.files.regular import SHORT_BYTES, read_regular

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system
NOTES = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
LOGGED = (
    "spec.json",
    "metrics.jsonl",
    "events.jsonl",
    "native.log",
    "native.*.log",
    "tensorboard",
    "tensorboard/events.out.tfevents.*",
)
# Of a point that was submitted to a queue (launcher=slurm, launcher=ray).
JOB_RECORD, JOB_SCRIPT, JOB_LOG, JOB_LIVES = JOB_FILES = (
    *("queue_job.json", "queue_job.sh", "queue_job.log", "queue_job.lives"),
)
EARLIER_JOB_FILES = ("slurm_job.json", "slurm_job.sh", "slurm_job.log", "slurm_job.lives")  # of the first version
# Files to which the processes of a point append, as long as they have them open.
APPENDED = ("events.jsonl", "metrics.jsonl", "native.log", "native.*.log")
LEFT_BY_REFUSED = (".hydra", *NOTES, "multirun.yaml", *LOGGED, *JOB_FILES)  # patterns
LARGEST_MARKER_BYTES = 2**16
SNAPSHOTS = "snapshots"  # the folder
STATE = "state.pt"  # in a snapshot that is a folder, all but the shards; its hash is in the folder's name
SNAPSHOT_NAME = re.compile(r"step_(\d+)\.([0-9a-f]{16})\.(?:pt|shards)")


class Kind(Enum):
    """What a folder holds."""

    RUN = "run"
    SWEEP = "sweep"


# Patterns of the files and folders that lowvram writes there.
SHARED = ("table.md", "table.csv", "rows.jsonl", "report.html", "figures", "wandb", "wandb_run_id", "wandb_table")
NAMES = {
    Kind.RUN: (
        *SHARED,
        ".hydra",
        "spec.json",
        "metrics.jsonl",
        "events.jsonl",
        "metrics.damaged.jsonl",
        "result.json",
        "native.log",
        "native.*.log",
        SNAPSHOTS,
        "model",
        "disturbed-*.json*",
        "fidelity",
        "experiment",
        "tensorboard",
        "memory.md",
        "memory_over_step.csv",
        "snapshot.pickle",
        "snapshot.html",
        *JOB_FILES,
        *EARLIER_JOB_FILES,
    ),
    Kind.SWEEP: (*SHARED, "multirun.yaml", "references"),
}


POINT = re.compile(r"[0-9a-f]{16}")  # the folder of a search's probe
PROBES = "[0-9a-f]" * 16  # the same as a pattern of files
FOLDERS = (
    ".hydra",
    "snapshots",
    "model",
    "cache",
    "fidelity",
    "experiment",
)  # of a run, in which files are written whole


def other_point(key: str, folder: str) -> BadInput:
    """The error for a folder that has the results of another point."""
    return BadInput(
        key, folder, "a folder for each point: this one is another point's; choose another, such as ${point_id:}"
    )


def is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def is_running(folder: Path) -> bool:
    """Whether a program writes in a folder now."""
    try:
        fd = os.open(folder / MARKER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        owner = owner_of(read_marker(os.pread(fd, LARGEST_MARKER_BYTES, 0)))
        return owner is not None and owner.may_be_alive()
    finally:
        os.close(fd)
    return False


def was_cut_off(folder: Path) -> bool:
    """Whether the last program that ran here died after a step of its was saved, so that the row is an older one's.
    Asked while nobody runs here."""
    try:
        owner = owner_of(read_marker(read_regular(folder / MARKER, SHORT_BYTES)))
        newest = snapshots_in(folder / SNAPSHOTS)[0].stat().st_mtime_ns
        return owner is not None and newest > (folder / rows.FILE_NAME).stat().st_mtime_ns
    except (OSError, IndexError):
        return False


def holds_run(folder: Path) -> bool:
    """Whether a folder has what a run leaves."""
    return rows.read(folder) is not None or has_snapshots(folder)


def holds_sweep(folder: Path) -> bool:
    """Whether a folder has what a sweep leaves."""
    return any(rows.read(path.parent) is not None for path in folder.glob(f"*/{rows.FILE_NAME}"))


def has_snapshots(folder: Path) -> bool:
    return bool(snapshots_in(folder / SNAPSHOTS))


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots, the newest first. Broken links, pipes, and folders without a state that have such names aren't
    ours."""
    named = (path for path in folder.glob("step_*") if SNAPSHOT_NAME.fullmatch(path.name) and is_snapshot(path))
    return sorted(named, key=lambda path: path.name, reverse=True)


def is_snapshot(path: Path) -> bool:
    """Whether there is what such a name promises: a file, or a folder with a state."""
    if path.suffix == ".pt":
        return path.is_file()
    return not path.is_symlink() and (path / STATE).is_file()


HOLDS = {Kind.RUN: holds_run, Kind.SWEEP: holds_sweep}
