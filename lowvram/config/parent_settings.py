"""The groups of plain values that only the parent uses: loggers and paths. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowvram.config.errors import require
from lowvram.config.schema import build_as

LONGEST_TAG, LONGEST_GROUP = 64, 128  # characters that W&B takes
MODEL = "model"  # the artifact: the folder with the exported weights


@dataclass(frozen=True)
class LoggerSettings:
    """`logger.*`: which loggers a run has, and what they are told beside its figures. All off: result.json alone."""

    wandb: bool = False
    tensorboard: bool = False
    entity: str | None = None
    project: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    artifact: str | None = None

    def __post_init__(self) -> None:
        allowed = f"a list of texts of 1 to {LONGEST_TAG} characters, such as [thesis,first]"
        for tag in self.tags:
            require(1 <= len(tag) <= LONGEST_TAG, "logger.tags", tag, allowed)
        allowed = f"null (lowvram chooses it) or 1 to {LONGEST_GROUP} characters"
        require(self.group is None or 1 <= len(self.group) <= LONGEST_GROUP, "logger.group", self.group, allowed)
        allowed = f"null or {MODEL}, which uploads the run's {MODEL}/ at its end"
        require(self.artifact in (None, MODEL), "logger.artifact", self.artifact, allowed)


def logger_settings(values: Mapping[str, Any]) -> LoggerSettings:
    """The typed values of `logger.*`."""
    return build_as(LoggerSettings, dict(values), "logger")


@dataclass(frozen=True)
class PathSettings:
    """`paths.*`"""

    outputs: str


PARENT_SECTIONS = {"logger": LoggerSettings, "paths": PathSettings}
