"""The interface of a logger, and what it is told of a run. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from lowvram.config.parent_settings import LoggerSettings
from lowvram.config.secret import text_without_secrets
from lowvram.config.texts import first_line
from lowvram.results.metrics import METRICS
from lowvram.results.row import GIB, Row
from lowvram.results.row_fields import at

# What a run was made with and on, as users filter by it. The seed and all other values are in the configuration.
OF_PROVENANCE = ("device_name", "driver", "threads", "torch", "lowvram", "python", "git_sha", "dirty", "command")

STEP_MEMORY = "memory_in_step"  # the section of the curves of memory by kind within one step


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told when a run begins, or goes on in another process."""

    folder: Path  # the run's; a logger writes nowhere else
    name: str
    group: str | None  # of runs that belong together, such as the points of a sweep
    kind: str  # its mode; of the table of a sweep: "sweep"
    settings: LoggerSettings
    config: Mapping[str, Any] = field(default_factory=dict)  # nested: see `config_of`
    step: int = 0  # rows up to this step are known; rows of later ones, from an earlier process, come again
    pid: int | None = None  # of the process that computes; None: none does


class Logger(ABC):
    """Logs one run. Any method may raise: the caller then goes on without this logger."""

    title: ClassVar[str]  # in messages

    @classmethod
    @abstractmethod
    def start(cls, run: LoggedRun) -> Self | None:
        """Begins to log the run, or goes on with the one that the folder holds; None: nothing is to be logged."""

    @abstractmethod
    def go_on(self, run: LoggedRun) -> None:
        """The same run goes on in another process, after `run.step`."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the figures of one step, under the names of `metrics.jsonl`."""

    @abstractmethod
    def log_curves(self, section: str, curves: Mapping[str, Sequence[float]]) -> None:
        """Logs curves of equal length over an axis of their own: 0, 1, 2 … `section/name` is the name of each."""

    @abstractmethod
    def finish(self, row: Row) -> None:
        """Logs the row's figures and how the run ended, and closes."""

    @property
    def notes(self) -> list[str]:
        """What the user must know at the end: where the run is, or why it isn't where it should be."""
        return []

    @property
    def upload(self) -> str | None:
        """The shell command that uploads what was logged offline."""
        return None


def config_of(config: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """What runs are sorted, grouped and filtered by: `choice`, the option of each group; `provenance`, hardware,
    versions and command; and the configuration, as composed. Nested, so that a logger shows `choice.precision`."""
    known = {name: value for name, value in row["provenance"].items() if value is not None}
    held = {name: known[name] for name in OF_PROVENANCE if name in known}
    if memory_bytes := known.get("device_memory_bytes"):
        held["device_memory_gib"] = round(memory_bytes / GIB, 2)
    return {"choice": dict(row["choices"]), "provenance": held, **config}


def final_values(row: Row) -> dict[str, float | str]:
    """Status, reason and the known figures of the row, under their names at loggers."""
    values = {key: row[key] for key in ("status", "reason", "disturbed")}
    for metric in METRICS:
        value = at(row, metric.path)
        if metric.logger_name is not None and value is not None:
            values[metric.logger_name] = metric.logger_value(value)
    scores = {
        f"eval/{name}": value for name, value in row["eval"].items()
    }  # a task may have scores that METRICS doesn't list
    return {name: value for name, value in {**values, **scores}.items() if value is not None}


def reason(error: Exception) -> str:
    """The first line of an error's message, without secrets."""
    return text_without_secrets(first_line(error))
