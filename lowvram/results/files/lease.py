"""`.lowvram.lease`: which program writes in a run's folder, for programs on other machines. Imports no torch.

Locks are exact on one machine. Whether another machine sees them depends on the file system and on how it is mounted.
So the program that holds a folder also keeps this file in it, and renews it (renewal.py). Whoever finds the file of
another machine watches whether it changes, by his own clock alone: the clocks of two machines are never compared.

A program that was taken for dead, as it was suspended or cut off, finds another token in the file: what it may no
longer write is refused here (`check_ours`), before each file gets its name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self, final

from lowvram.config.errors import printable
from lowvram.results.files.marker import MARKER, born_ticks, read_marker
from lowvram.results.files.regular import SHORT_BYTES, read_dated, read_regular

LEASE = f"{MARKER}.lease"
LEASE_BYTES, SPARE_BYTES = 2**10, 2**6  # the file's size, which never changes; of a long path what digits may grow by
TOKEN = re.compile("[0-9a-f]{16}")
LONGEST_HOST = 255  # characters that are shown
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


class Machine(NamedTuple):
    """Where the number of a process means that process, until the next start of the machine."""

    host: str
    boot: str
    namespace: str  # of processes: a container's numbers are its own


def this_machine() -> Machine:
    boot = namespace = ""
    with suppress(OSError):
        boot, namespace = BOOT.read_text().strip(), os.readlink(NAMESPACE)  # noqa: PTH115  # a link to nowhere
    return Machine(socket.gethostname(), boot, namespace)


@final
@dataclass(frozen=True)
class Lease:
    """What the file says.

    Attributes:
        token: no two leases share one.
        born_ticks: see `Owner`.
        folder: where its owner sees it: a copy of a folder holds a lease that isn't its own.
        renewed: UTC, by the owner's clock, for people alone.
        beat: how often it was renewed.
    """

    token: str
    host: str
    boot: str
    namespace: str
    pid: int
    born_ticks: int
    folder: str
    renewed: str
    beat: int

    @classmethod
    def mine(cls, folder: Path) -> Self:
        """A new one, of this process."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), *this_machine(), pid, born_ticks(pid) or 0, str(folder), now_in_words(), 0)

    @classmethod
    def parsed(cls, data: bytes) -> Self | None:
        """None if it isn't a whole one."""
        try:
            lease = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = {"int": int, "str": str}
        is_whole = all(isinstance(getattr(lease, each.name), kinds[str(each.type)]) for each in fields(cls))
        return lease if is_whole and TOKEN.fullmatch(lease.token) else None

    def encoded(self, num_bytes: int) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(num_bytes - 1) + b"\n"

    def is_of_here(self) -> bool:
        """Whether its owner's number means a process here."""
        return self.boot != "" and (self.host, self.boot, self.namespace) == this_machine()

    def is_alive_here(self, folder: Path) -> bool:
        """Whether its owner, a process of this machine, lives and holds this very folder."""
        return self.folder == str(folder) and born_ticks(self.pid) == self.born_ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {printable(self.host[:LONGEST_HOST])}"


def now_in_words() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


class Seen(NamedTuple):
    """A lease as somebody has found it."""

    lease: Lease | None  # None: nobody can tell whose it is
    mark: tuple[bytes, int]  # another one after each renewal

    @property
    def token(self) -> str:
        return "unknown" if self.lease is None else self.lease.token


def found_at(path: Path) -> Seen | None:
    """The lease in a file; None if there is no file. Raises OSError if it can't be read."""

    try:
        mark = read_dated(path, SHORT_BYTES)
    except FileNotFoundError:
        return None
    return Seen(Lease.parsed(mark[0]), mark)


# Of this process: for each folder that it holds, or that it writes for the program that holds it, the lease's token.
_ours: dict[Path, str] = {}


class TakenOver(OSError):
    """Another program has taken the folder, so this one may write there no more."""

    def __init__(self, path: Path) -> None:
        what = "another program has taken this folder over, as this one had not renewed its lease"
        super().__init__(errno.ESTALE, what, str(path))


def guard(folder: Path, token: str) -> None:
    """From now on write in a folder only as long as its lease has this token."""
    _ours.update(dict.fromkeys(names_of(folder), token))


def unguard(folder: Path) -> None:
    """Write there again without asking, as in any folder."""
    for name in names_of(folder):
        _ours.pop(name, None)


def names_of(folder: Path) -> set[Path]:
    """As somebody typed it, and without links."""
    return {Path(os.path.abspath(folder)), folder.resolve()}  # noqa: PTH100


def check_ours(path: Path) -> None:
    """Before a file gets its name, or leftovers are removed. Raises TakenOver if they are another program's by now."""
    for folder, token in list(_ours.items()) if _ours else ():
        if Path(os.path.abspath(path)).is_relative_to(folder) and not is_ours(folder, token):  # noqa: PTH100
            raise TakenOver(path)


def is_ours(folder: Path, token: str) -> bool:
    """Whether nobody else has taken a folder whose lease had this token. Also where that can't be told now, and where
    the folder is gone."""
    try:
        seen = found_at(folder / LEASE)
        if seen is not None:
            return seen.lease is None or seen.lease.token == token
        return read_marker(read_regular(folder / MARKER, SHORT_BYTES)).get("lease") == token
    except OSError:
        return True
