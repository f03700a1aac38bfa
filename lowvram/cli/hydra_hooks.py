"""Hydra calls `Start` (conf/hydra/default.yaml) before it makes the folder of a run or sweep. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, read_write

from lowvram.cli import job
from lowvram.cli.sweeper import CheckingSweeper
from lowvram.config.compose import MISTAKES, check_left_to_us
from lowvram.config.errors import Refused, require
from lowvram.launch.torchrun import launch_from


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
            if launch_from() is not None:
                hint = "start a sweep without it, and sharding.ranks=2 (or more) for each point"
                raise Refused(f"-m under torchrun: {hint}")
            check_left_to_us(config.hydra)
            check_plugins(config.hydra)


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
    launchers, sweepers = (Plugins.instance().discover(plugin) for plugin in (Launcher, Sweeper))
    checking = [cls for cls in sweepers if issubclass(cls, CheckingSweeper)]  # another's points would have no names
    for key, classes in {"launcher": launchers, "sweeper": checking}.items():
        known = [f"{cls.__module__}.{cls.__name__}" for cls in classes]
        target = hydra[key]["_target_"]
        require(target in known, f"hydra.{key}._target_", target, f"one of {', '.join(sorted(known))}")
    size, params = (hydra.sweeper.get(key) for key in ("max_batch_size", "params"))
    is_number = size is None or (type(size) is int and size > 0)
    require(is_number, "hydra.sweeper.max_batch_size", size, "null or a whole number of at least 1")
    allowed = "null or keys with their values, such as {seed: '1,2'}"
    require(params is None or isinstance(params, DictConfig), "hydra.sweeper.params", params, allowed)
