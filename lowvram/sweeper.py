"""Sweeps: all points are checked before the first one starts, and named by what differs between them.

The class that Hydra knows is hydra_plugins/lowvram_sweeper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from lowvram.point import remove_folder

Batch = Sequence[Sequence[str]]
Check = Callable[[list[DictConfig], Batch], None]

_checks: list[Check] = []


def register(check: Check) -> None:
    """`check` gets all composed points of a sweep, and their overrides, before the first one starts."""
    _checks[:] = [check]


def check(configs: list[DictConfig], batch: Batch) -> None:
    """Raises what the first mistake in any point is."""
    for one in _checks:
        one(configs, batch)


def forget(config: DictConfig) -> None:
    """Remove a sweep's folder that holds nothing yet but Hydra's note of the command."""
    folder = Path(config.hydra.sweep.dir)
    if [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
        remove_folder(folder, Path(str(config.paths.outputs)))


def swept_keys(batch: Batch) -> list[str]:
    """The keys whose values differ between points, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for overrides in batch:
        for override in overrides:
            key, _, value = override.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1]
