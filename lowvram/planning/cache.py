"""Keeps traces on disk, one file each, named by a hash of everything that the trace depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, final

import torch

from lowvram.config.cache_folder import cache_folder
from lowvram.core.knob import Knob
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Trace
from lowvram.results.files.durable import write
from lowvram.tasks import Problem

HASH_BYTES = 16
OBJECT_ADDRESS = " at 0x"  # in the default repr of an object, which doesn't identify its contents


def default_folder() -> Path:
    return cache_folder() / "traces"


def write_if_possible(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically. If that fails in any way, there is no file, and no error: many libraries, such as torch,
    raise errors of their own where the disk is full."""
    with suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, fill)


@final
class TraceCache:
    """A folder of traces. A file that can't be read, or whose bytes don't match the hash before them, counts as
    missing; failing to write one is no error."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def get(self, key: str | None) -> Trace | None:
        if key is None:
            return None
        try:
            data = (self.folder / key).read_bytes()
            if data[:HASH_BYTES] != hash_of(data[HASH_BYTES:]):  # torch doesn't look at the checksums in its files
                return None
            columns: dict[str, Any] = torch.load(BytesIO(data[HASH_BYTES:]), weights_only=True)
            return Trace(**columns) if columns.pop("key") == key else None
        except Exception:  # the file is missing, cut short, or no trace
            return None

    def put(self, key: str | None, trace: Trace) -> None:
        """Write a trace; does nothing if the key is None."""
        if key is None:
            return
        columns = {field.name: getattr(trace, field.name) for field in fields(trace)}
        saved = BytesIO()
        torch.save(columns | {"key": key}, saved)
        write_if_possible(self.folder / key, lambda file: file.write(hash_of(saved.getvalue()) + saved.getvalue()))


def hash_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def key_of(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> str | None:
    """The name of a trace's file: a hash of everything that the trace depends on. None if the repr of any of it
    contains an object's address, as that of user code may: its contents could change under the same name."""
    about = repr((problem.description, list(knobs.values()), batch_size, target, torch.__version__, sources()))
    return None if OBJECT_ADDRESS in about else hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


@cache
def sources() -> str:
    """A hash of lowvram's own source files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
