"""Hydra calls these hooks when a run, sweep or job begins or ends; they pass sweeps and jobs on to `listeners`. Imports
no torch.

The classes that Hydra makes are `Start` (conf/hydra/default.yaml) and hydra_plugins/lowvram_sweeper.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, read_write

from lowvram.cli import job
from lowvram.cli.sweep import SweepBatch
from lowvram.config.compose import MISTAKES
from lowvram.config.errors import require
from lowvram.results.row import Row


class Listener(Protocol):
    """What reacts to Hydra's callbacks: `Call` in cli/call.py."""

    def begin_sweep(self, config: DictConfig) -> None:
        """Before a sweep's points are composed: take its folder."""

    def launch(self, launcher: Launcher, coming: SweepBatch) -> None:
        """Check a batch of a sweep's points, and run them."""

    def end_job(self, job: JobReturn) -> None:
        """A job of this process has ended."""

    def is_over(self) -> bool:
        """Whether no more points are to be run."""
        ...

    def row(self, index: int) -> Row | None:
        """The row of a point that has ended, by its index; None if it has none."""
        ...


listeners: list[Listener] = []  # none in the process of a launcher


def is_over() -> bool:
    """Whether no more points are to be run."""
    return any(listener.is_over() for listener in listeners)


def row(index: int) -> Row | None:
    """The row of a point that has ended."""
    return next((row for listener in listeners if (row := listener.row(index)) is not None), None)


class NotBegun(BaseException):
    """An error before Hydra makes the run's folder. Hydra only warns of an `Exception` in a callback and goes on; a
    `BaseException` gets through."""

    def __init__(self, mistake: Exception) -> None:
        super().__init__(mistake)
        self.mistake = mistake


@contextmanager
def mistakes_end_it() -> Iterator[None]:
    """Let the errors of a callback end the call."""
    try:
        yield
    except (*MISTAKES, OSError) as error:
        raise NotBegun(error) from None


class Start(Callback):
    """Hydra creates one for each run and each sweep, and calls it before any folder is made."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with mistakes_end_it():
            check_folder(config.hydra)
            note_config(config)
            job.begin_run(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with mistakes_end_it():
            check_folder(config.hydra)
            for listener in listeners:
                listener.begin_sweep(config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        for listener in listeners:
            listener.end_job(job_return)


def note_config(config: DictConfig) -> None:
    """Do as Hydra does later for the job: a folder's name may refer to it."""
    HydraConfig.instance().set_config(config)
    folder = Path(config.hydra.run.dir)
    if ".." in folder.parts:  # of a path through a link, Hydra would make one folder and name another
        with read_write(config.hydra):
            config.hydra.run.dir = str(folder.resolve())
        HydraConfig.instance().set_config(config)


def check_folder(hydra: DictConfig) -> None:
    """Raises BadInput if jobs are to run in another working directory."""
    allowed = (
        "false: your modules, data and models are looked for where you are, and results go to hydra.run.dir anyway"
    )
    require(not hydra.job.chdir, "hydra.job.chdir", hydra.job.chdir, allowed)


def check_plugins(hydra: DictConfig) -> None:
    """Raises BadInput for a plugin that Hydra doesn't have or settings that the sweeper can't use; Hydra itself would
    end with a traceback."""
    for key, plugin in {"launcher": Launcher, "sweeper": Sweeper}.items():
        known = [f"{cls.__module__}.{cls.__name__}" for cls in Plugins.instance().discover(plugin)]
        target = hydra[key]["_target_"]
        require(target in known, f"hydra.{key}._target_", target, f"one of {', '.join(sorted(known))}")
    size, params = (hydra.sweeper.get(key) for key in ("max_batch_size", "params"))
    is_number = size is None or (type(size) is int and size > 0)
    require(is_number, "hydra.sweeper.max_batch_size", size, "null or a whole number of at least 1")
    allowed = "null or keys with their values, such as {seed: '1,2'}"
    require(params is None or isinstance(params, DictConfig), "hydra.sweeper.params", params, allowed)
