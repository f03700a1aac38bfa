"""Takes the folder of a run or of a sweep: so that one program writes in it. Imports no torch.

`.lowvram` marks a folder with our results. A program that runs a point holds a lock on that file (flock), and so do the
point's processes, until the last of them has ended. The kernel releases the lock however they die. The file also names
the process that holds it. On a file system without such locks the folder counts as held as long as that process runs on
this machine. Programs on other machines see the lock on some network file systems; on all of them they see the lease of
a run's folder (lease.py).

A program removes only what it has made itself: folders that it has created, and files whose names it has found free.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from lowvram.config.errors import BadInput
from lowvram.config.exit_codes import EXIT_INTERRUPTED
from lowvram.config.version import __version__
from lowvram.results.files.durable import made_folders, remove_empty, remove_files, remove_leftovers, write_bytes
from lowvram.results.files.lease import LEASE, found_at
from lowvram.results.files.links import is_plain, strange_in
from lowvram.results.files.marker import MARKER, Owner, owner_of, read_marker
from lowvram.results.files.regular import read_regular
from lowvram.results.files.renewal import Lost, OwnLease, Taken, Watch
from lowvram.results.files.run_folder import (
    APPENDED,
    FOLDERS,
    HOLDS,
    LARGEST_MARKER_BYTES,
    LEFT_BY_REFUSED,
    NAMES,
    NO_LOCKS,
    POINT,
    PROBES,
    Kind,
    has_snapshots,
    is_same_file,
    other_point,
    was_cut_off,
)

STDERR = 2
NUM_TRIES, TRY_S = 5, 0.05  # another program may hold the lock only for a moment, to test it
MARKER_BYTES = 2**10  # of each marker that is written, padded with blanks


def end_at_once(reason: str) -> None:
    """End this process, in whatever it is."""
    with suppress(OSError):
        os.write(STDERR, f"{reason}\n".encode())
    os._exit(EXIT_INTERRUPTED)


class Held(BadInput):
    """Another program writes in the folder.

    Attributes:
        who: that program, as far as it is known.
        is_unsure: whether it may have died on another machine: a later try tells (`Watch`).
    """

    def __init__(self, key: str, folder: Path, who: str, is_unsure: bool = False) -> None:
        self.who, self.is_unsure = who, is_unsure
        mend = "wait for its end, stop it, or choose another folder"
        super().__init__(key, str(folder), f"a folder in which nobody else runs: {self.who} does; {mend}")


@final
class Claim:
    """A folder that this program may write in, until `release` or `undo`.

    Args:
        key: what the user typed for the folder, for messages.
        point: the id of the point that the folder is for; None: whichever it held.
        watch: of earlier tries to claim the folder.
        on_lost: called by another thread if a program on another machine takes the folder, since this one was suspended
            or cut off for long; with what to tell the user. It must end this process, which may write there no more.

    Raises:
        Held: another program writes there.
        BadInput: it holds another point, or files of somebody else that have the names of ours.
        OSError: it can't be made or written.
    """

    def __init__(
        self,
        folder: Path,
        kind: Kind,
        key: str,
        point: str | None = None,
        watch: Watch | None = None,
        on_lost: Lost = end_at_once,
    ) -> None:
        self.folder, self.kind, self._key = folder.absolute(), kind, key
        self.created = made_folders(self.folder)
        self._before = b""  # the marker's content before this claim
        self._has_written = False  # into the marker
        self.is_new = False  # whether this program has made the marker
        self._there_before = set[Path]()  # of what has the name of something that a refused run leaves
        self.was_cut_off = False  # see `was_cut_off`, as it was before this claim
        self.run: str | None = None  # id of the run, stored in its snapshots
        self.lease: OwnLease | None = None  # of a run's folder
        self.fd = -1
        try:
            self.fd = self._open()
            self._check(self._before, point)
            if kind is Kind.RUN:
                self._take_lease(watch or Watch(self.folder), on_lost)
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

    @property
    def fence(self) -> tuple[str, str] | None:
        """For processes that write in the folder for this one: the folder, and the token that its lease has as long as
        they may."""
        return None if self.lease is None else (str(self.folder), self.lease.token)

    def _take_lease(self, watch: Watch, on_lost: Lost) -> None:
        """Take the folder also from programs on other machines. If one of them is taken for dead, what it has open
        there gets new files: it may come back, and what it then appends mustn't be this run's."""
        self._check_lease()
        self.lease = lease = OwnLease(self.folder, on_lost)
        try:
            lease.take(watch)
        except Taken as taken:
            raise Held(self._key, self.folder, taken.who, taken.is_unsure) from None
        lease.begin()
        lease.tidy()
        for path in (path for name in APPENDED for path in self.folder.glob(name)) if lease.may_come_back else ():
            if is_plain(path):
                write_bytes(path, read_regular(path))

    def _check_lease(self) -> None:
        """Raise BadInput if a file with the lease's name is none, nor one that its maker was about to write."""
        for _ in range(NUM_TRIES):  # another machine may be writing it
            found = found_at(self.folder / LEASE)
            if found is None or found.lease is not None or not found.mark[0].strip(b"\0 \n"):
                return
            time.sleep(TRY_S)
        allowed = (
            f"a folder whose {LEASE} can be read: it is damaged or somebody else's; remove it if nothing runs there"
        )
        raise BadInput(self._key, str(self.folder), allowed)

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
                if owner is None or not owner.may_be_alive() or (not owner.is_of_here() and self._has_lease()):
                    return None
                break
        owner = owner_of(read_marker(os.pread(fd, LARGEST_MARKER_BYTES, 0)))
        raise Held(self._key, self.folder, str(owner or "another program"))

    def _has_lease(self) -> bool:
        return os.path.lexists(self.folder / LEASE)

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
        if (strange := strange_in(self.folder, (*NAMES[self.kind], *probes, LEASE))) is not None:
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
        fields, owner = read_marker(self._before), owner_of(read_marker(self._before))
        if fields.get("kind") != self.kind.value or (owner is not None and not owner.is_of_here()):
            return  # one on another machine, which may not see the lock, hasn't said that it has ended
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
            "lease": None if self.lease is None else self.lease.token,
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
            self._close()

    def _close(self) -> None:
        if self.lease is not None:
            self.lease.release()
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
            self._close()
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
        if self._has_written and not self._is_named():
            return False
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
