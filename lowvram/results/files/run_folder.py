"""The folder of a run or of a sweep: which program writes in it, and which files in it are ours. Imports no torch.

`.lowvram` marks a folder with our results. A program that runs a point holds a lock on that file (flock), and so do the
point's processes, until the last of them has ended. The kernel releases the lock however they die, and other machines
see it on network file systems. The file also names the process that holds it. On a file system without such locks the
folder counts as held as long as that process runs on this machine, and always if it is on another machine.

A program removes only what it has made itself: folders that it has created, and files whose names it has found free.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import final

from lowvram.config.errors import BadInput
from lowvram.config.version import __version__
from lowvram.results import row as rows
from lowvram.results.files.durable import made_folders, remove_empty, remove_files, remove_leftovers
from lowvram.results.files.links import strange_in
from lowvram.results.files.marker import MARKER, Owner, owner_of, read_marker
from lowvram.results.files.regular import SHORT_BYTES, read_regular

NUM_TRIES, TRY_S = 5, 0.05  # another program may hold the lock only for a moment, to test it
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
# Of a point that was submitted to a queue (launcher=slurm).
JOB_RECORD, JOB_SCRIPT, JOB_LOG, JOB_LIVES = JOB_FILES = (
    *("slurm_job.json", "slurm_job.sh", "slurm_job.log", "slurm_job.lives"),
)
LEFT_BY_REFUSED = (".hydra", *NOTES, "multirun.yaml", *LOGGED, *JOB_FILES)  # patterns
LARGEST_MARKER_BYTES = 2**16
MARKER_BYTES = 2**10  # of each marker that is written, padded with blanks
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


class Held(BadInput):
    """Another program writes in the folder. `who` describes it, as far as it is known."""

    def __init__(self, key: str, folder: Path, owner: Owner | None) -> None:
        self.who = str(owner or "another program")
        mend = "wait for its end, stop it, or choose another folder"
        super().__init__(key, str(folder), f"a folder in which nobody else runs: {self.who} does; {mend}")


@final
class Claim:
    """A folder that this program may write in, until `release` or `undo`.

    Args:
        key: what the user typed for the folder, for messages.
        point: the id of the point that the folder is for; None: whichever it held.

    Raises:
        Held: another program writes there.
        BadInput: it holds another point, or files of somebody else that have the names of ours.
        OSError: it can't be made or written.
    """

    def __init__(self, folder: Path, kind: Kind, key: str, point: str | None = None) -> None:
        self.folder, self.kind, self._key = folder.absolute(), kind, key
        self.created = made_folders(self.folder)
        self._before = b""  # the marker's content before this claim
        self._has_written = False  # into the marker
        self.is_new = False  # whether this program has made the marker
        self._there_before = set[Path]()  # of what has the name of something that a refused run leaves
        self.was_cut_off = False  # see `was_cut_off`, as it was before this claim
        self.run: str | None = None  # id of the run, stored in its snapshots
        self.fd = -1
        try:
            self.fd = self._open()
            self._check(self._before, point)
            self._tidy()
            self.was_cut_off = was_cut_off(self.folder)
            self.run = self._named_run()
            self._write_marker(Owner.me(), point)
        except BaseException:
            self.undo()
            raise

    @property
    def marker(self) -> Path:
        return self.folder / MARKER

    def _open(self) -> int:
        """Open the marker and lock it."""
        while True:
            fd = self._open_marker()
            try:
                self._before = os.pread(fd, LARGEST_MARKER_BYTES, 0)
                if self.kind is Kind.SWEEP:
                    self._tidy_alone(fd)
                self._lock(fd)
                if is_same_file(fd, self.marker):  # else another program has just removed it
                    self._before = os.pread(fd, LARGEST_MARKER_BYTES, 0)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _open_marker(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.is_new = False
        try:
            return os.open(self.marker, flags)
        except FileNotFoundError:
            self._check_names()
        self._there_before = self._found()
        try:
            fd = os.open(self.marker, flags | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return os.open(self.marker, flags)
        self.is_new = True
        return fd

    def _lock(self, fd: int) -> None:
        how = fcntl.LOCK_EX if self.kind is Kind.RUN else fcntl.LOCK_SH  # the points of a sweep have locks of their own
        for _ in range(NUM_TRIES):
            try:
                return fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(TRY_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                owner = owner_of(read_marker(self._before))
                if owner is None or not owner.may_be_alive():
                    return None
                break
        owner = owner_of(read_marker(os.pread(fd, LARGEST_MARKER_BYTES, 0)))
        raise Held(self._key, self.folder, owner)

    def _check(self, text: bytes, point: str | None) -> None:
        """Raise BadInput if the marker is damaged, or says that the folder is for another kind or point; or if a link
        has one of our names."""
        held = read_marker(text)
        if text.strip() and "lowvram" not in held:  # empty: its maker was killed at once
            allowed = (
                f"a folder whose {MARKER} can be read: it is damaged or somebody else's; remove it if nothing runs"
            )
            raise BadInput(self._key, str(self.folder), f"{allowed} there")
        if held.get("kind", self.kind.value) != self.kind.value:
            allowed = f"a folder for a {self.kind.value}: this one holds a {held['kind']}"
            raise BadInput(self._key, str(self.folder), allowed)
        if point is not None and held.get("point") not in (None, point):
            raise other_point(self._key, str(self.folder))
        probes = [PROBES] if self.kind is Kind.RUN else []
        if (strange := strange_in(self.folder, (*NAMES[self.kind], *probes))) is not None:
            allowed = f"a folder whose {strange.name} is a file or folder of its own: lowvram would write through it"
            raise BadInput(self._key, str(self.folder), f"{allowed}, to what isn't this run's; remove the link or pipe")

    def _check_names(self) -> None:
        """Raise BadInput if somebody else's file has the name of one of ours. Results of an early version are ours."""
        if HOLDS[self.kind](self.folder):
            return
        taken = sorted(path.name for name in NAMES[self.kind] for path in self.folder.glob(name))
        if taken:
            allowed = f"a folder without {', '.join(taken)}, which lowvram would write: choose another one, or rename"
            raise BadInput(self._key, str(self.folder), f"{allowed} what is there")

    def _tidy_alone(self, fd: int) -> None:
        """Remove leftovers of programs of this sweep that died while they wrote, if none of them runs now."""
        if read_marker(self._before).get("kind") != self.kind.value:
            return
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_leftovers(self.folder)
            remove_leftovers(self.folder / "references")
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _tidy(self) -> None:
        """Remove leftovers of programs that died while they wrote in a run's folder (a sweep's: `_tidy_alone`)."""
        if self.kind is Kind.RUN:
            probes = [path for path in self.folder.iterdir() if POINT.fullmatch(path.name)]
            for folder in (self.folder, *(self.folder / name for name in FOLDERS), *probes):
                if not folder.is_symlink():
                    remove_leftovers(folder)

    def _named_run(self) -> str | None:
        """The id of the run in the folder, new if it has none; None for an early version's snapshots."""
        named = read_marker(self._before).get("run")
        is_new = self.kind is Kind.RUN and not has_snapshots(self.folder)
        return named or (secrets.token_hex(8) if is_new else None)

    def _write_marker(self, owner: Owner | None, point: str | None) -> None:
        """Write into the marker who holds the lock. In place, since a new file would not be locked."""
        fields = {
            "lowvram": __version__,
            "kind": self.kind.value,
            "point": point or read_marker(self._before).get("point"),
            "run": self.run,
        }
        self._has_written = True
        self._rewrite(json.dumps(fields | {"owner": owner and vars(owner)}).encode())

    def _rewrite(self, text: bytes) -> None:
        """Overwrite the old text as a whole, in one call. All texts have one size, since another program of the sweep
        may write its own at the same time: cutting the file to the size of this one could cut that one."""
        os.pwrite(self.fd, text.rstrip().ljust(max(MARKER_BYTES, os.fstat(self.fd).st_size) - 1) + b"\n", 0)

    def release(self) -> None:
        """Unlock the folder; its results stay, and other programs may resume them."""
        if self.fd >= 0:
            with suppress(OSError):
                self._give_back()
            os.close(self.fd)
            self.fd = -1

    def undo(self) -> None:
        """After a refused run: restore the folder to what it was before, and unlock it."""
        if self.fd >= 0:
            with suppress(OSError):
                if self.is_new and self._is_alone():
                    self._remove_ours()
                elif not self.is_new and self._has_written and self._is_named():
                    self._rewrite(self._before)
            os.close(self.fd)
            self.fd = -1
        remove_empty(self.created)

    def _give_back(self) -> None:
        """Nobody holds the folder any more, unless another program of the sweep is named there by now."""
        if self._is_named():
            fields = read_marker(os.pread(self.fd, LARGEST_MARKER_BYTES, 0))
            self._rewrite(json.dumps(fields | {"owner": None}).encode())

    def _is_named(self) -> bool:
        """Whether the marker names this program."""
        owner = owner_of(read_marker(os.pread(self.fd, LARGEST_MARKER_BYTES, 0)))
        return owner is not None and (owner.pid, owner.host) == (os.getpid(), socket.gethostname())

    def _found(self) -> set[Path]:
        return {path for pattern in LEFT_BY_REFUSED for path in self.folder.glob(pattern)}

    def _is_alone(self) -> bool:
        """Whether no other program has joined."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in NO_LOCKS
        return True

    def _remove_ours(self) -> None:
        """Remove the files that a refused run leaves, if only in its first step, and none that was there before. If
        others of ours are left, such as W&B's, the folder stays a run's."""
        found = self._found() - self._there_before
        folders = {path for path in found if path.is_dir() and not path.is_symlink()}
        remove_files(found - folders)
        remove_empty(folders)
        if any(True for name in NAMES[self.kind] for _ in self.folder.glob(name)):
            self._give_back()
        else:
            self.marker.unlink()


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
