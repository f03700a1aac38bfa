"""Hydra's sweeper, with one more promise: a mistake in any point is told before the first one starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from lowvram.point import remove_folder

Batch = Sequence[Sequence[str]]


class PointSweeper(BasicSweeper):
    """conf/hydra/sweeper/lowvram.yaml"""

    check: ClassVar[Callable[[list[DictConfig], Batch], None]]  # set by the program that sweeps

    def validate_batch_is_legal(self, batch: Batch) -> None:
        """Compose and check every point of the sweep; raises what the first mistake is."""
        assert self.hydra_context is not None
        assert self.config is not None
        compose = self.hydra_context.config_loader.load_sweep_config
        try:
            type(self).check([compose(self.config, list(overrides)) for overrides in batch], batch)
        except Exception:
            forget_sweep(Path(self.config.hydra.sweep.dir))
            raise


def register(check: Callable[[list[DictConfig], Batch], None]) -> None:
    """Make the sweeper known to Hydra; `check` gets all composed points and their overrides."""
    PointSweeper.check = staticmethod(check)
    Plugins.instance().register(PointSweeper)


def forget_sweep(folder: Path) -> None:
    """Remove a sweep's folder that holds nothing yet but Hydra's note of the command."""
    if [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
        remove_folder(folder)


def swept_keys(batch: Batch) -> list[str]:
    """The keys whose values differ between points, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for overrides in batch:
        for override in overrides:
            key, _, value = override.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1]
