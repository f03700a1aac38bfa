"""Hydra finds its plugins in this package, and nowhere else. What the sweeper tells the program is in
lowvram/hydra_hooks.py; how points are listed and named, in lowvram/sweeper.py."""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram import hydra_hooks, sweeper


class PointSweeper(BasicSweeper):
    """conf/hydra/sweeper/lowvram.yaml: Hydra's basic sweeper, but with lists of points beside grids, and a mistake in
    any point is told before the first. It writes nothing into the sweep's folder: the program does."""

    def __init__(self, max_batch_size: int | None, params: Any = None, points: Any = None) -> None:
        super().__init__(max_batch_size, params)
        self.points = points

    def sweep(self, arguments: list[str]) -> None:
        """Check and launch all points, in batches of `max_batch_size`."""
        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        typed = parser.parse_overrides([*self._parse_config(), *arguments])
        num_launched = 0
        for grid in self.split_arguments(typed, self.max_batch_size):
            batch = sweeper.with_points(grid, self.points)
            self.validate_batch_is_legal(batch)
            self.launcher.launch(batch, initial_job_idx=num_launched)
            num_launched += len(batch)

    def validate_batch_is_legal(self, batch: hydra_hooks.Batch) -> None:
        """Compose and check every point of the sweep; raises what the first mistake is."""
        assert self.hydra_context is not None
        assert self.config is not None
        compose = self.hydra_context.config_loader.load_sweep_config
        hydra_hooks.check_sweep([compose(self.config, list(overrides)) for overrides in batch], batch)
