"""Hydra finds its plugins in this package, and nowhere else. What the sweeper promises is in lowvram/sweeper.py."""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from lowvram import sweeper


class PointSweeper(BasicSweeper):
    """conf/hydra/sweeper/lowvram.yaml: Hydra's basic sweeper, but with lists of points beside grids, and a mistake in
    any point is told before the first."""

    def __init__(self, max_batch_size: int | None, params: Any = None, points: Any = None) -> None:
        super().__init__(max_batch_size, params)
        self.points = points

    def get_job_batch(self) -> sweeper.Batch:
        return sweeper.with_points(super().get_job_batch(), self.points)

    def validate_batch_is_legal(self, batch: sweeper.Batch) -> None:
        """Compose and check every point of the sweep; raises what the first mistake is."""
        assert self.hydra_context is not None
        assert self.config is not None
        compose = self.hydra_context.config_loader.load_sweep_config
        try:
            sweeper.check([compose(self.config, list(overrides)) for overrides in batch], batch)
        except BaseException:
            sweeper.forget(self.config)
            raise
