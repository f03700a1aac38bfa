"""Reads `.lowvram`, the file that marks a folder as holding our results, and names the program that runs there.
claim.py writes and locks it.
Imports no torch, and nothing that takes time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.results.files.regular import SHORT_BYTES, read_regular

MARKER = ".lowvram"


@dataclass(frozen=True)
class Owner:
    """The program that a marker names."""

    pid: int
    host: str
    started: str  # UTC
    born_ticks: int  # start time in clock ticks since boot: another process may get the same pid

    @classmethod
    def me(cls) -> Owner:
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(os.getpid(), socket.gethostname(), started, born_ticks(os.getpid()) or 0)

    def may_be_alive(self) -> bool:
        """Whether the process may still run, judged without the lock."""
        return not self.is_of_here() or born_ticks(self.pid) == self.born_ticks

    def is_of_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


def born_ticks(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None: there is no such process, or it has
    ended and nobody has asked how."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def read_marker(text: bytes) -> dict[str, Any]:
    """The fields of a marker; empty if it can't be parsed."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def point_of(folder: Path) -> str | None:
    """The id of the point that the marker of its folder names; None if it names none."""
    try:
        return read_marker(read_regular(folder / MARKER, SHORT_BYTES)).get("point")
    except OSError:
        return None


def owner_of(fields: dict[str, Any]) -> Owner | None:
    try:
        return Owner(**fields["owner"])
    except (KeyError, TypeError):
        return None
