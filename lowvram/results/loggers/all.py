"""All loggers of a run. One that fails costs a sentence, never the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import final

from lowvram.config.parent_settings import LoggerSettings
from lowvram.results.loggers.logger import LoggedRun, Logger, reason
from lowvram.results.loggers.tensorboard import TensorBoard
from lowvram.results.loggers.wandb import WandbRun
from lowvram.results.row import Row

LOGGERS: Mapping[str, type[Logger]] = {"wandb": WandbRun, "tensorboard": TensorBoard}  # by their switches in logger.*


@final
class Loggers:
    """The loggers that `logger.*` switches on."""

    def __init__(self) -> None:
        self._loggers: list[Logger] = []
        self._stopped: list[Logger] = []  # those that have failed
        self._problems: list[str] = []
        self._has_begun = False

    def begin(self, run: LoggedRun) -> None:
        """Start the loggers; at a later call, the run goes on in another process."""
        if self._has_begun:
            self._each(lambda logger: logger.go_on(run))
        else:
            for cls in switched_on(run.settings):
                self._start(cls, run)
        self._has_begun = True

    def _start(self, cls: type[Logger], run: LoggedRun) -> None:
        try:
            logger = cls.start(run)
        except Exception as error:
            self._problems.append(f"{cls.title} does not record this point: {reason(error)}")
        else:
            self._loggers += [] if logger is None else [logger]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, values))

    def log_curves(self, section: str, curves: Mapping[str, Sequence[float]]) -> None:
        self._each(lambda logger: logger.log_curves(section, curves))

    def finish(self, row: Row) -> None:
        """Log the row, and close the loggers."""
        self._each(lambda logger: logger.finish(row))

    def _each(self, action: Callable[[Logger], None]) -> None:
        """Do it with each logger; leave out those that fail."""
        for logger in list(self._loggers):
            try:
                action(logger)
            except Exception as error:
                self._loggers.remove(logger)
                self._stopped.append(logger)
                self._problems.append(f"{logger.title} stopped recording: {reason(error)}")

    @property
    def notes(self) -> list[str]:
        """What the user must know at the end."""
        return [*self._problems, *(note for logger in (*self._stopped, *self._loggers) for note in logger.notes)]

    @property
    def uploads(self) -> list[str]:
        """Shell commands that upload what was logged offline."""
        return [upload for logger in (*self._stopped, *self._loggers) if (upload := logger.upload)]


def switched_on(settings: LoggerSettings) -> list[type[Logger]]:
    """The loggers whose switch is on."""
    switches = asdict(settings)
    return [cls for name, cls in LOGGERS.items() if switches[name]]
