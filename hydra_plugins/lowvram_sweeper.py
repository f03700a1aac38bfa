"""Hydra's default sweeper here. Points are listed and named in lowvram/cli/sweep.py, and run in lowvram/cli/call.py."""

from __future__ import annotations

from functools import partial
from typing import Any, cast, final

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram.cli import sweep as sweeper
from lowvram.cli.linked_points import Rounds
from lowvram.cli.sweeper import CheckingSweeper


@final
class PointSweeper(CheckingSweeper):
    """conf/hydra/sweeper/lowvram.yaml: as Hydra's basic sweeper, but with lists of points beside grids."""

    def __init__(self, max_batch_size: int | None, params: Any = None, points: Any = None) -> None:
        self.max_batch_size, self.params, self.points = max_batch_size, params or {}, points

    def sweep(self, arguments: list[str]) -> None:
        """Launch all points, in batches of `max_batch_size`. Wrong options are reported before the first of them."""
        assert self.config is not None
        compose = partial(self.loader.look, self.config)
        parser = OverridesParser.create(config_loader=cast(ConfigLoader, self.loader))
        configured = [f"{key}={value}" for key, value in self.params.items()]
        typed = parser.parse_overrides([*configured, *arguments])
        num_launched = 0
        for grid in sweeper.grid(typed, self.max_batch_size):
            batch, names = sweeper.with_points(grid, self.points)
            num_launched += Rounds(batch, names, num_launched, compose, self.call).launch(self.launch)
