"""Which evaluation of a run is the best one, and when the run ends before its last step.

Of several ranks the first one decides, and the others do as it does: a score of the user's own may differ between them,
and clocks do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple, Self, final

from lowvram.config.errors import BadInput, require
from lowvram.config.training import TrainSettings
from lowvram.core.mesh import all_ranks
from lowvram.loops.session import Session
from lowvram.results.metrics import METRICS, Better

KEY = "snapshot.best"
LOSS = "loss/eval"
OTHER_NAMES = {"eval/loss": LOSS}  # beside those of metrics.jsonl: the other scores begin so
DIRECTIONS = {"min": Better.SMALLER, "max": Better.LARGER}
S_PER_HOUR = 3600
STEPS, PATIENCE, MAX_HOURS = "steps", "patience", "max_hours"  # why a run has ended: `training.ended_by` of a row


def said_end(ended_by: str | None, step: int, train: TrainSettings) -> str | None:
    """The same. Says why a run ends before its last step."""
    reasons = {
        PATIENCE: f"{train.patience} evaluations in a row were no better (train.patience)",
        MAX_HOURS: f"train.max_hours={train.max_hours:g} are over" if train.max_hours else "",
    }
    if ended_by in reasons:
        print(f"ended after step {step} of {train.steps}: {reasons[ended_by]}")
    return ended_by


class Figure(NamedTuple):
    """A figure of evaluations, by its name in metrics.jsonl, and which of two values is the better one."""

    name: str
    better: Better


def figure_of(session: Session) -> Figure | None:
    """The figure that `snapshot.best` names; None: no best evaluation is looked for.

    Raises:
        BadInput: the run's evaluations don't have it, or nobody says which of two values is the better one.
    """
    text = session.settings.snapshot.best
    if text is None:
        return None
    typed, _, direction = text.partition(":")
    name, own = OTHER_NAMES.get(typed, typed), own_scores(session)
    scores = (*session.problem.scores(0.0, 0.0), *session.rig.eval_means)
    named = {LOSS: None} | dict.fromkeys(f"eval/{score}" for score in scores) | dict.fromkeys(own)
    require(name in named, KEY, text, f"null or a figure that this run's evaluations have: {', '.join(named)}")
    known = None if name in own else known_better(name)
    if known is None and not direction:
        raise BadInput(KEY, text, f"{typed}:max if a larger one is better, or {typed}:min: lowvram doesn't know it")
    better = DIRECTIONS.get(direction, known)
    is_sure = better is not None and known in (None, better)
    require(
        is_sure, KEY, text, f"{typed}, of which a {'larger' if known is Better.LARGER else 'smaller'} one is better"
    )
    assert better is not None
    return Figure(name, better)


def own_scores(session: Session) -> list[str]:
    """The names of `eval.metrics`, whatever others they are like."""
    return [f"eval/{target.rpartition('.')[2]}" for target in session.settings.eval.metrics or ()]


def known_better(name: str) -> Better | None:
    """Which of two values of a figure of ours is the better one; None: not known."""
    found = (metric.better for metric in METRICS if metric.logger_name == name)
    return next((better for better in found if better is not Better.NEITHER), None)


@final
class Best:
    """The best evaluation so far, and how many have followed it.

    A value that isn't finite is no improvement; nor is one that only equals the best.

    Args:
        figure: None: no evaluation is the best.
        patience: after how many evaluations in a row without improvement the run ends; None: it doesn't.
    """

    def __init__(self, figure: Figure | None, patience: int | None) -> None:
        self.figure, self.patience = figure, patience
        self.step: int | None = None  # after which it was made
        self.value = math.nan
        self.num_since = 0  # evaluations since then

    @classmethod
    def of(cls, session: Session) -> Self:
        """Raises BadInput as `figure_of` does."""
        return cls(figure_of(session), session.settings.train.patience)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare an evaluation with the best one. A collective: all ranks must call it."""
        if self.figure is None:
            return
        value = all_ranks().gather(float(metrics[self.figure.name]))[0]
        gain = self.figure.better * (value - self.value)
        if math.isfinite(value) and (self.step is None or gain > 0):
            self.step, self.value, self.num_since = step, value, 0
        else:
            self.num_since += 1

    def is_step(self, step: int) -> bool:
        """Whether it was made after this step."""
        return step == self.step

    @property
    def is_over(self) -> bool:
        """Whether the run ends for lack of improvement."""
        return self.patience is not None and self.num_since >= self.patience

    def state(self) -> dict[str, Any]:
        if self.figure is None:
            return {}
        return {"figure": self.figure.name, "step": self.step, "value": self.value, "num_since": self.num_since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`. The best one by another figure isn't this one's."""
        if self.figure is None or state.get("figure") != self.figure.name:
            return
        self.step = None if state["step"] is None else index(state["step"])
        self.value, self.num_since = float(state["value"]), index(state["num_since"])

    def forget(self) -> None:
        """Look for the best of the evaluations to come: the snapshot of the best so far is gone."""
        print(f"the snapshot of step {self.step}, of the best {KEY}={self.value:g}, is gone: a later one is looked for")
        self.step, self.value = None, math.nan

    def fields(self) -> dict[str, Any]:
        """For a run's row."""
        return {"best_step": self.step, "best_value": None if self.step is None else self.value}


@final
class Hours:
    """How long the run has trained, over all processes that have gone on with it. What one of them did after its last
    snapshot is lost, and doesn't count.

    Args:
        limit: after how many hours the run ends; None: never, and nothing is counted.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit_s = None if limit is None else limit * S_PER_HOUR
        self._earlier_s, self._since = 0.0, time.monotonic()

    def begin(self) -> None:
        """Count from now on."""
        self._since = time.monotonic()

    def spent_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._since

    def is_over(self) -> bool:
        """Whether the time is over. A collective: all ranks must call it."""
        if self.limit_s is None:
            return False
        return all_ranks().any(all_ranks().is_first and self.spent_s() >= self.limit_s)

    def state(self) -> dict[str, Any]:
        return {} if self.limit_s is None else {"spent_s": self.spent_s()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, for `begin`."""
        self._earlier_s = float(state.get("spent_s", 0.0))
