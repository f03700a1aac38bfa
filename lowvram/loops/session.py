"""All that a mode works with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from lowvram.config.settings import Settings
from lowvram.core.knob import Knob
from lowvram.core.ranks import agree, num_ranks, summed
from lowvram.core.rig import IGNORE, Part, Rig, Update
from lowvram.core.step import step
from lowvram.data.loader import Loader, Waited
from lowvram.data.source import Data
from lowvram.loops.schedule import Schedule
from lowvram.tasks import Problem


class Interrupted(BaseException):
    """Somebody asked the point to stop."""


class NonFinite(ArithmeticError):
    """The loss or the gradients are no numbers any more."""


class Events(Protocol):
    """The way to the parent."""

    def __call__(self, event: str, **fields: Any) -> None: ...

    def commit(self) -> bool:
        """Wait until the rows that were told are on the disk; False if the parent is gone, or slow."""
        ...


class Stop(Protocol):
    """Whether somebody asked the point to stop."""

    requested: bool

    def defer_interrupts(self) -> AbstractContextManager[None]: ...


@final
@dataclass(frozen=True)
class Session:
    """One point, assembled and ready to run."""

    settings: Settings
    knobs: dict[str, Knob]
    problem: Problem
    rig: Rig
    data: Data
    events: Events
    stop: Stop
    folder: Path
    is_resumed: bool
    started: float  # time.monotonic() when the child began
    resident_bytes: int  # of the process, before it did anything
    chosen: Mapping[str, Any] = field(default_factory=dict)  # the option of each group, and each value, by dotted key
    run: str | None = None  # what its snapshots are known by

    def begin(
        self,
        step: int,
        num_steps: int,
        untold: Sequence[Mapping[str, Any]] = (),
        known: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """All is set up, and nothing can be refused any more: the steps come.

        Args:
            untold: rows of `metrics.jsonl` up to `step` that may be missing there.
            known: of some rows up to `step` what they say, if they are there.
        """
        print(f"data: {self.data.description}")
        accum, num_samples = self.settings.groups["accum"], self.settings.train.batch_size // num_ranks()
        parts = {"parts": accum.parts, "more_parts": accum.more_parts(num_samples)}
        self.events(
            "begin",
            step=step,
            num_steps=num_steps,
            setup_s=self.age_s(),
            untold=list(untold),
            known=list(known),
            **parts,
        )

    def batches(self, first_step: int) -> Waited:
        """The logical batches from `first_step` on, without end; of several ranks each gets its slice."""
        loader: Loader = self.settings.groups["loader"]
        batch_size, seed = self.settings.train.batch_size, self.settings.root.seed
        return Waited(loader.batches(self.data.train, batch_size, seed, first_step, self.rig.device), first_step)

    def largest(self, batches: Waited, last: Part) -> Part:
        """The largest of some batches, made again; or the last one where all are of one size."""
        if len(set(batches.sizes)) == 1:
            return last
        again = self.batches(batches.first_step + batches.sizes.index(max(batches.sizes)))
        try:
            return next(again)
        finally:
            again.close()

    def update(self, batch: Part, num_applied: int, num_steps: int) -> tuple[Tensor, Update]:
        """One step at the learning rate that is due after `num_applied` updates of `num_steps`.

        Raises:
            NonFinite: the gradients are not finite, and no smaller loss scale can help.
        """
        self.rig.stepper.set_lr(self.lr(num_applied, num_steps))
        loss, update = step(self.rig, batch)
        if not (update.applied or update.recoverable):
            remedy = self.remedy(self.problem.num_targets(batch))
            raise NonFinite(f"the gradients are not finite any more (loss {loss.item():g}): {remedy}")
        return loss, update

    def lr(self, num_applied: int, num_steps: int) -> float:
        """The learning rate after `num_applied` updates: a skipped one doesn't move the schedule."""
        schedule: Schedule = self.settings.groups["schedule"]
        return self.settings.groups["optimizer"].lr * schedule.factor(num_applied, num_steps)

    def agree(self, flag: bool) -> bool:
        """Whether any rank says yes, so that none takes a step more than another; all must ask."""
        return agree(flag)

    def remedy(self, num_targets: Tensor) -> str:
        """What helps against a loss that is no number, after a batch with so many targets. All ranks must ask."""
        if not summed(num_targets):
            return f"no target counts in this batch, all are {IGNORE}: leave such samples out of the data"
        smaller_lr = self.settings.groups["optimizer"].lr / 10
        return f"try a smaller learning rate (optimizer.lr={smaller_lr:g}) or stepping.clip=1.0"

    def age_s(self) -> float:
        """Seconds since the child began."""
        return time.monotonic() - self.started
