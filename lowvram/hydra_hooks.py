"""What Hydra calls while it begins a run or a sweep, and the program that hears of it. Imports no torch.

The classes that Hydra makes are `RunStart` (conf/hydra/default.yaml) and hydra_plugins/lowvram_sweeper.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lowvram.config import require

Batch = Sequence[Sequence[str]]  # of points, each with its overrides


class Program(Protocol):
    """Who has called Hydra."""

    def begin_run(self, config: DictConfig) -> None:
        """Before a single run's folder is made: take it. Hydra only warns of what is raised here, unless it is a
        KeyboardInterrupt."""

    def begin_sweep(self, config: DictConfig) -> None:
        """Before a sweep's points are composed: take its folder. Raises what stands in the way."""

    def check_sweep(self, configs: list[DictConfig], batch: Batch) -> None:
        """Before the first point of a batch starts: raises what the first mistake in any of them is."""


_programs: list[Program] = []


def register(program: Program) -> None:
    """`program` hears of what Hydra begins from now on."""
    _programs[:] = [program]


class RunStart(Callback):
    """Hydra makes it for each run and tells it before the run's folder is made."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        for program in _programs:
            program.begin_run(config)


def begin_sweep(config: DictConfig, max_batch_size: Any) -> None:
    """Raises BadInput if no number of points may run together, or what else stands in the way."""
    is_number = max_batch_size is None or (type(max_batch_size) is int and max_batch_size > 0)
    require(is_number, "hydra.sweeper.max_batch_size", max_batch_size, "null or a whole number of at least 1")
    for program in _programs:
        program.begin_sweep(config)


def check_sweep(configs: list[DictConfig], batch: Batch) -> None:
    """Raises what the first mistake in any point is."""
    for program in _programs:
        program.check_sweep(configs, batch)
