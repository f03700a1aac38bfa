"""Keeps traces on disk, so that none is made twice: one file each, named by a hash of all that it depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import IO, Any, final

import torch

from lowvram.core.knob import Knob
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Trace
from lowvram.results.files.durable import write
from lowvram.tasks import Problem

PLACE = "LOWVRAM_CACHE"  # an environment variable
NAMELESS = " at 0x"  # part of the default repr of an object, which tells nothing about its contents


def cache_folder() -> Path:
    """The folder of everything that lowvram caches on this machine."""
    return Path(os.environ.get(PLACE) or Path.home() / ".cache" / "lowvram")


def default_folder() -> Path:
    return cache_folder() / "traces"


def written_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file that other processes see whole or not at all. If that fails, there is no file, and no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, fill)


@final
class TraceCache:
    """A folder of traces. One that can't be read is traced again; one that can't be written isn't kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def get(self, key: str | None) -> Trace | None:
        if key is None:
            return None
        try:
            columns: dict[str, Any] = torch.load(self.folder / key, weights_only=True)
            return Trace(**columns) if columns.pop("key") == key else None
        except Exception:  # the file is missing, cut short, or no trace
            return None

    def put(self, key: str | None, trace: Trace) -> None:
        """Keep a trace, if it has a key."""
        if key is None:
            return
        columns = {field.name: getattr(trace, field.name) for field in fields(trace)}
        written_whole(self.folder / key, lambda file: torch.save(columns | {"key": key}, file))


def key_of(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> str | None:
    """The name of a trace: a hash of all that it depends on. None if something that it depends on has no
    description."""
    about = repr((problem.description, list(knobs.values()), batch_size, target, torch.__version__, sources()))
    return None if NAMELESS in about else hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


@cache
def sources() -> str:
    """A hash of lowvram's own source files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
