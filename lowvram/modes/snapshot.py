"""Snapshots: all that a run needs to go on as if nothing had happened. One file each, hashed, never half there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, final

import torch

from lowvram.core.ranks import first_goes_first, rank

NAME = re.compile(r"step_(\d+)\.([0-9a-f]{16})\.pt")


@final
class Snapshots:
    """The snapshots of one run, in `folder`. A file's name carries its step and the hash of its bytes."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write beside, hash, rename; then forget all but the newest `keep`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / "unfinished.tmp"
        try:
            with beside.open("wb") as file:
                torch.save(state, file)
            path = self.folder / f"step_{step:08d}.{fingerprint(beside)}.pt"
            beside.rename(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        for old in self.newest_first()[self.keep :]:
            old.unlink()
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest sound snapshot, on the CPU; damaged ones are named aloud. None if there is none.

        All ranks load it, and must."""
        with first_goes_first():
            return self._load()

    def _load(self) -> dict[str, Any] | None:
        for path in self.newest_first():
            match = NAME.fullmatch(path.name)
            if match is not None and fingerprint(path) == match[2]:
                print(f"continuing from {path}")
                return torch.load(path, map_location="cpu", weights_only=True)
            aside = path.with_suffix(".damaged")  # no snapshot any more: it must not count among those that are kept
            path.rename(aside)
            print(f"{path} is damaged (its bytes don't match its hash), now {aside.name}: going back to the one before")
        return None

    def newest_first(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("step_*.pt") if NAME.fullmatch(path.name)), reverse=True)


def fingerprint(path: Path) -> str:
    """The first 64 bits of the SHA-256 of a file, as 16 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def my_random_state(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
    """This rank's part of what `random_state` told on each; None where there were fewer ranks."""
    return states[rank()] if rank() < len(states) else None


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
