"""Traces on disk, so that nobody waits for the same one twice: one file for each, found by what it depends on."""

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
NAMELESS = " at 0x"  # in what Python says of an object that has no description of its own


def cache_folder() -> Path:
    """Of all that this program keeps on a machine."""
    return Path(os.environ.get(PLACE) or Path.home() / ".cache" / "lowvram")


def default_folder() -> Path:
    return cache_folder() / "traces"


def written_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """A file that other processes see whole or not at all. Where it can't be written, there is none."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, fill)


@final
class Store:
    """A folder of traces. What can't be read is traced anew; what can't be written is not kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def get(self, key: str | None) -> Trace | None:
        if key is None:
            return None
        try:
            columns: dict[str, Any] = torch.load(self.folder / key, weights_only=True)
            return Trace(**columns) if columns.pop("key") == key else None
        except Exception:  # it isn't there, was cut short, or is of another kind
            return None

    def put(self, key: str | None, trace: Trace) -> None:
        """Other processes see it whole or not at all."""
        if key is None:
            return
        columns = {field.name: getattr(trace, field.name) for field in fields(trace)}
        written_whole(self.folder / key, lambda file: torch.save(columns | {"key": key}, file))


def key_of(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> str | None:
    """The name of a trace: a hash of all that it depends on. None: something has no description."""
    about = repr((problem.description, list(knobs.values()), batch_size, target, torch.__version__, sources()))
    return None if NAMELESS in about else hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


@cache
def sources() -> str:
    """A hash of this program."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
