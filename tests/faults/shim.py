"""The page of memory through which a test tells the shim (shim.c) what to do in all processes of a program."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
PLACE = "LOWVRAM_FAULT_PAGE"  # an environment variable: the file that is the page
LONGEST = 1024
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


class Operation(IntFlag):
    """Calls that change files."""

    OPEN = 1  # for writing
    WRITE = 2
    RENAME = 4
    FSYNC = 8
    UNLINK = 16
    MKDIR = 32


ALL = Operation(63)


class Action(IntEnum):
    """What happens at the chosen call."""

    COUNT = 0
    FAIL = 1
    FAIL_FROM = 2  # this one and all later ones, as on a disk that stays full
    KILL = 3


class Role(IntEnum):
    """The processes of a program."""

    PROGRAM = 0
    SERVER = 1
    CHILD = 2


class Page(ctypes.Structure):
    """As in shim.c."""

    _fields_ = (
        ("operations", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("signal", ctypes.c_int32),
        ("victims", ctypes.c_uint32),
        ("pids", ctypes.c_int32 * 3),
        ("count", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("folder", ctypes.c_char * LONGEST),
        ("hit", ctypes.c_char * LONGEST),
    )

    def rest(self) -> None:
        """Nothing is looked at any more."""
        self.operations = 0

    def begin(self, folder: Path, operations: Operation = ALL) -> None:
        """Count from here on, below `folder`; nothing fails yet."""
        self.rest()
        self.action, self.count, self.target, self.hit = Action.COUNT, 0, 0, b""
        self.folder = os.fsencode(folder)
        self.operations = operations

    def fail(self, number: int, error: int, lasting: bool = False) -> None:
        """The call with this number fails, counted from 1."""
        self.error, self.target = error, number
        self.action = Action.FAIL_FROM if lasting else Action.FAIL

    def kill(self, number: int, victims: tuple[Role, ...], how: signal.Signals = signal.SIGKILL) -> None:
        """These processes get a signal at the call with this number."""
        self.signal, self.target, self.victims = how, number, sum(1 << role for role in victims)
        self.action = Action.KILL


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiled(folder: Path) -> Path:
    """The shim, as a library in `folder`."""
    library, cc = folder / "shim.so", compiler()
    assert cc, "no C compiler (cc): the fault suite compiles its shim with it"
    command = [cc, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(folder: Path) -> dict[str, str]:
    """What a process is started with that the shim is to be in; its page lies in `folder`."""
    path = folder / "page"
    path.write_bytes(bytes(-(-ctypes.sizeof(Page) // mmap.PAGESIZE) * mmap.PAGESIZE))
    return {"LD_PRELOAD": str(compiled(folder)), PLACE: str(path)}


def page_here() -> Page:
    """That of the shim in this process."""
    with Path(os.environ[PLACE]).open("r+b") as file:
        return Page.from_buffer(mmap.mmap(file.fileno(), 0))
