"""What Hydra calls while it begins a run or a sweep, and the program that hears of it. Imports no torch.

The classes that Hydra makes are `Start` (conf/hydra/default.yaml) and hydra_plugins/lowvram_sweeper.py.
"""

from __future__ import annotations

from typing import Any, Protocol

from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from lowvram.cli.sweep import Coming
from lowvram.config.errors import require


class Program(Protocol):
    """Who has called Hydra."""

    def begin_run(self, config: DictConfig) -> None:
        """Before a single run's folder is made: take it. Hydra only warns of what is raised here and in `begin_sweep`,
        unless it is a KeyboardInterrupt."""

    def begin_sweep(self, config: DictConfig) -> None:
        """Before a sweep's points are composed: take its folder."""

    def begin_batch(self, coming: Coming) -> None:
        """Before the first point of a batch starts: raises what the first mistake in those is that stand for all."""


_programs: list[Program] = []


def register(program: Program) -> None:
    """`program` hears of what Hydra begins from now on."""
    _programs[:] = [program]


class Start(Callback):
    """Hydra makes it for each run and each sweep, and tells it before any folder is made."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        for program in _programs:
            program.begin_run(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        for program in _programs:
            program.begin_sweep(config)


def check_plugins(hydra: DictConfig) -> None:
    """Raises BadInput for what Hydra would only say with a traceback: a plugin that it doesn't have, or settings of the
    sweeper that it can't use."""
    for key, plugin in {"launcher": Launcher, "sweeper": Sweeper}.items():
        known = [f"{found.__module__}.{found.__name__}" for found in Plugins.instance().discover(plugin)]
        target = hydra[key]["_target_"]
        require(target in known, f"hydra.{key}._target_", target, f"one of {', '.join(sorted(known))}")
    size, params = (hydra.sweeper.get(key) for key in ("max_batch_size", "params"))
    is_number = size is None or (type(size) is int and size > 0)
    require(is_number, "hydra.sweeper.max_batch_size", size, "null or a whole number of at least 1")
    allowed = "null or keys with their values, such as {seed: '1,2'}"
    require(params is None or isinstance(params, DictConfig), "hydra.sweeper.params", params, allowed)


def begin_batch(coming: Coming) -> None:
    """Raises what the first mistake in those points is that stand for all."""
    for program in _programs:
        program.begin_batch(coming)
