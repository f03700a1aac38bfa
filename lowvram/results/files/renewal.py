"""Takes, renews and gives back the lease of a run's folder (lease.py). Imports no torch.

All that has to be exact is done by two calls that are atomic on NFS, too: `link`, of which one succeeds where several
programs make the same name, and `rename`. A lease is made under another name and linked to its own. That of a dead
program is replaced in two steps: whoever links his to a name that holds the dead one's token may rename it over the
dead one. Then each reads back whose it is.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from lowvram.results.files.durable import naming, unfinished_name
from lowvram.results.files.lease import (
    LEASE,
    LEASE_BYTES,
    SPARE_BYTES,
    Lease,
    Seen,
    found_at,
    guard,
    is_ours,
    now_in_words,
    unguard,
)
from lowvram.results.files.marker import MARKER

LOOK_S = 1.0  # between two looks at the lease of a program that may be dead
BEAT_S = 10.0  # from one renewal to the next
DEAD_S = 70.0  # unchanged for so long: its owner is dead. A machine sees a file's change after 60 s at the latest
NUM_TRIES = 20  # of steps in which others may be faster
# Errors of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EOPNOTSUPP)
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
Lost = Callable[[str], None]  # told what to say when somebody else has taken the folder


class Taken(Exception):
    """The folder is another program's.

    Args:
        who: that program, as far as it is known.
        is_unsure: whether it may be dead: watching for longer tells.
    """

    def __init__(self, who: str, is_unsure: bool) -> None:
        super().__init__(who)
        self.who, self.is_unsure = who, is_unsure


@final
class Watch:
    """Tells the lease of a dead program from that of a slow one, over several looks at one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[object, float]] = {}  # by the file: the mark, and since when it is the same

    def check_dead(self, path: Path, seen: Seen) -> None:
        """Raises Taken unless the owner of the lease in a file is dead."""
        lease, now = seen.lease, time.monotonic()
        if lease is not None and lease.is_of_here():
            if lease.is_alive_here(self._folder):
                raise Taken(str(lease), is_unsure=False)
            return
        who = str(lease or "another program")
        mark, since = self._known.setdefault(path, (seen.mark, now))
        if mark != seen.mark:
            self._known[path] = (seen.mark, now)
            raise Taken(f"{who}, which renewed its lease less than {LOOK_S:g} s ago,", is_unsure=False)
        if now - since < DEAD_S:
            raise Taken(f"{who}, which hasn't renewed its lease for {now - since:.0f} s or more,", is_unsure=True)


@final
class OwnLease:
    """A folder's lease that is this process's.

    Attributes:
        may_come_back: whether it was another machine's program's, which isn't dead for certain.
    """

    def __init__(self, folder: Path, on_lost: Lost) -> None:
        self.folder, self._on_lost = folder, on_lost
        self.lease, self.may_come_back = Lease.mine(folder), False
        self._num_bytes = max(LEASE_BYTES, len(self.lease.encoded(0)) + SPARE_BYTES)

    @property
    def path(self) -> Path:
        return self.folder / LEASE

    @property
    def token(self) -> str:
        return self.lease.token

    def begin(self) -> None:
        """Renew it from now on. Where no thread can be started, which a limit on processes forbids, there is no lease:
        others would take one that isn't renewed for a dead program's."""
        guard(self.folder, self.token)
        try:
            _keeper.add(self)
        except RuntimeError:
            self.release()

    def take(self, watch: Watch) -> None:
        """Take the folder. Raises Taken if it is another program's, or OSError if it can't be written."""
        beside = unfinished_name(self.path)
        try:
            for _ in range(NUM_TRIES):
                if self._place(beside, self.path) or self._replaced(beside, watch):
                    return
        finally:
            with suppress(OSError):
                beside.unlink()
        raise Taken("another program", is_unsure=True)

    def _place(self, beside: Path, path: Path) -> bool:
        """Give the lease a name, whole at once; returns whether the name was free."""
        flags, text = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, self.lease.encoded(self._num_bytes)
        try:
            if not beside.exists():  # also where another program has taken it for a leftover
                write_new(beside, flags, text)
            os.link(beside, path)
        except FileExistsError:
            return self._is_in(path)  # a server that answers twice says so of our own link
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with suppress(FileExistsError):
                write_new(path, flags, text)
                return True
            return False
        return True

    def _is_in(self, path: Path) -> bool:
        seen = found_at(path)
        return seen is not None and seen.token == self.token

    def _replaced(self, beside: Path, watch: Watch) -> bool:
        """Replace the lease of a dead program; False if another one is there now, or none. Raises Taken if its owner
        lives, or if another program is replacing it."""
        if (dead := found_at(self.path)) is None:
            return False
        watch.check_dead(self.path, dead)
        successor = self.path.with_name(f"{LEASE}.{dead.token}")
        if not self._place(beside, successor):
            if (rival := found_at(successor)) is not None:
                watch.check_dead(successor, rival)
                successor.unlink(missing_ok=True)
            return False
        if (now := found_at(self.path)) is None or now.mark != dead.mark:
            successor.unlink(missing_ok=True)
            return False
        with suppress(FileNotFoundError):
            successor.replace(self.path)
        if not self._is_in(self.path):
            return False
        self.may_come_back = dead.lease is None or not dead.lease.is_of_here()
        return True

    def tidy(self) -> None:
        """Remove what programs have left that died while they took the folder."""
        for path in self.folder.glob(f"{LEASE}.*"):
            path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Renew it, unless the file is another program's. What the disk refuses is tried again at the next beat."""
        try:
            fd = os.open(self.path, os.O_RDWR | FLAGS)
        except FileNotFoundError:
            self._return()
            return
        except OSError:
            return
        try:
            self._renew_in(fd)
        except OSError:
            pass
        finally:
            with suppress(OSError):
                os.close(fd)

    def _renew_in(self, fd: int) -> None:
        there = Lease.parsed(os.pread(fd, self._num_bytes, 0))
        if there is None:  # somebody's, who has just made it
            return
        if there.token != self.token:
            self._lose(str(there))
            return
        self.lease = replace(self.lease, beat=self.lease.beat + 1, renewed=now_in_words())
        try:
            os.pwrite(fd, self.lease.encoded(self._num_bytes), 0)
        except OSError:  # the disk is full: a file's time takes no space
            os.utime(fd)

    def _return(self) -> None:
        """Somebody has removed the file: make it again, unless another program was in the folder meanwhile."""
        if not is_ours(self.folder, self.token):
            self._lose("another program")
        elif (self.folder / MARKER).exists():
            beside = unfinished_name(self.path)
            with suppress(OSError):
                self._place(beside, self.path)
            with suppress(OSError):
                beside.unlink()

    def _lose(self, who: str) -> None:
        _keeper.remove(self)
        wrong = f"{self.folder}: {who} has taken this folder over, as this program had not renewed its lease there"
        self._on_lost(f"{wrong}: it ends, and leaves the folder as it is")

    def release(self) -> None:
        """Give the folder back, if it is this process's still."""
        _keeper.remove(self)
        with suppress(OSError):
            if self.lease.pid == os.getpid() and self._is_in(self.path):
                self.path.unlink()
        unguard(self.folder)


def write_new(path: Path, flags: int, text: bytes) -> None:
    """Make a file; none is left if it can't be written."""
    fd = os.open(path, flags, 0o644)
    try:
        with naming(path):
            while text:
                text = text[os.write(fd, text) :]
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


@final
class Keeper:
    """Renews the leases of this process, in a thread that lives as long as there are any. It keeps no program alive."""

    def __init__(self) -> None:
        self._held: list[OwnLease] = []
        self._lock = threading.RLock()  # held while leases are renewed
        self._is_over: threading.Event | None = None  # ends the thread

    def add(self, held: OwnLease) -> None:
        """Raises RuntimeError if no thread can be started."""
        with self._lock:
            if self._is_over is None:
                is_over = threading.Event()
                threading.Thread(target=self._run, args=(is_over,), name="leases", daemon=True).start()
                self._is_over = is_over
            self._held.append(held)

    def remove(self, held: OwnLease) -> None:
        """When this returns, the lease is renewed no more."""
        with self._lock:
            self._held = [each for each in self._held if each is not held]
            if not self._held and self._is_over is not None:
                self._is_over.set()
                self._is_over = None

    def _run(self, is_over: threading.Event) -> None:
        while not is_over.wait(BEAT_S):
            with self._lock:
                for held in () if is_over.is_set() else list(self._held):
                    held.renew()


_keeper = Keeper()


def forget() -> None:
    """In a fork: the leases are its parent's."""
    global _keeper
    _keeper = Keeper()


os.register_at_fork(after_in_child=forget)
