"""What a training run goes by: `train.*` and `snapshot.*`, and when it ends. Imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

from lowvram.config.errors import BadInput, require
from lowvram.config.transforms import ExportedWeights, ExportSettings

BEST = r"[^:\s]+(:min|:max)?"  # a figure's name and, if need be, which of two values is the better one


class OnNonfinite(Enum):
    """What becomes of a step whose loss or a gradient isn't finite. The names are what a user types."""

    stop = "it ends the run"
    skip = "it is undone, and the run goes on with the next batch"


@dataclass(frozen=True)
class TrainSettings:
    """`train.*`"""

    batch_size: int
    steps: int
    epochs: float | None
    eval_every: int | None
    log_every: int
    noise_scale: bool
    rehearse: bool
    patience: int | None = None
    max_hours: float | None = None
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    max_skipped: int = 10

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        allowed = "null (train.steps counts) or above 0"
        require(self.epochs is None or self.epochs > 0, "train.epochs", self.epochs, allowed)
        require(
            self.eval_every is None or self.eval_every >= 1,
            "train.eval_every",
            self.eval_every,
            "null or at least 1",
        )
        patience, hours = self.patience, self.max_hours
        require(patience is None or patience >= 1, "train.patience", patience, "null or at least 1 evaluation")
        is_time = hours is None or 0 < hours < math.inf
        require(is_time, "train.max_hours", hours, "null (no limit) or more than 0 hours, such as 8 or 0.5")
        require(self.max_skipped >= 1, "train.max_skipped", self.max_skipped, "at least 1 step in a row")


@dataclass(frozen=True)
class SnapshotSettings:
    """`snapshot.*`"""

    every_steps: int | None
    keep: int
    sharded_above_gib: float | None
    best: str | None = None

    def __post_init__(self) -> None:
        allowed = "null (only at the end and at an interrupt) or at least 1"
        require(
            self.every_steps is None or self.every_steps >= 1,
            "snapshot.every_steps",
            self.every_steps,
            allowed,
        )
        require(self.keep >= 1, "snapshot.keep", self.keep, "at least 1")
        is_size = self.sharded_above_gib is None or self.sharded_above_gib >= 0  # false of nan
        allowed = "null (one file, whatever its size) or at least 0 GiB"
        require(is_size, "snapshot.sharded_above_gib", self.sharded_above_gib, allowed)
        allowed = (
            "null or a figure of an evaluation, such as loss/eval or eval/accuracy; of your own, eval/f1:max or :min"
        )
        require(self.best is None or bool(re.fullmatch(BEST, self.best)), "snapshot.best", self.best, allowed)

    @property
    def sharded_above_bytes(self) -> float:
        return math.inf if self.sharded_above_gib is None else self.sharded_above_gib * 2**30


def check_ending(train: TrainSettings, snapshot: SnapshotSettings, export: ExportSettings) -> None:
    """Raises BadInput if a key needs another one: evaluations to choose from, or the figure to choose by."""
    if snapshot.best is not None and train.eval_every is None:
        allowed = "null without train.eval_every: the only evaluation is the one at the end (try train.eval_every=100)"
        raise BadInput("snapshot.best", snapshot.best, allowed)
    by = "without snapshot.best, the figure to go by (try snapshot.best=loss/eval)"
    if train.patience is not None and snapshot.best is None:
        raise BadInput("train.patience", train.patience, f"null {by}")
    if export.of is ExportedWeights.best and snapshot.best is None:
        raise BadInput("export.of", export.of.name, f"last {by}")
