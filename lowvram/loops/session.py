"""Everything that a mode works with: one point, assembled."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from lowvram.config.settings import Settings
from lowvram.core.knob import Knob
from lowvram.core.mesh import all_ranks, data_ranks
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.step import step
from lowvram.core.stepper import Update
from lowvram.data.batch_sizes import BatchSizes
from lowvram.data.loader import Loader, TimedBatches
from lowvram.data.source import Data
from lowvram.knobs.accum import in_parts_of_largest
from lowvram.loops.noise_scale import Noise, NotMeasured
from lowvram.loops.schedule import Schedule
from lowvram.loops.skipping import Skips
from lowvram.tasks import Problem

NO_TARGET = f"no target counts in this batch, all are {IGNORE}"


class Interrupted(BaseException):
    """Somebody asked the point to stop."""


class NonFinite(ArithmeticError):
    """The loss or the gradients are not finite, and the run can't go on."""


class Events(Protocol):
    """Sends events to the parent process."""

    def __call__(self, event: str, **fields: Any) -> bool:
        """Send one; False if the parent is gone."""
        ...


class StopRequest(Protocol):
    """Whether somebody asked the point to stop."""

    requested: bool

    def defer_interrupts(self) -> AbstractContextManager[None]: ...


def parts_of(settings: Settings) -> dict[str, int | None]:
    """In how many parts a rank computes its slice of a batch, and how many it may try if memory runs out."""
    accum, num_samples = settings.groups["accum"], settings.train.batch_size // data_ranks().size
    return {"parts": accum.parts, "more_parts": accum.more_parts(num_samples)}


@final
@dataclass(frozen=True)
class Session:
    """One point, assembled and ready to run."""

    settings: Settings
    knobs: dict[str, Knob]
    problem: Problem
    rig: Rig
    data: Data
    sizes: BatchSizes  # of the logical batches
    events: Events
    stop: StopRequest
    folder: Path
    is_resumed: bool
    started: float  # time.monotonic() when the child began
    resident_bytes: int  # resident memory of the process before it did anything
    malloc_bytes: int | None  # what malloc had allocated before the model was made; None: not known
    chosen: Mapping[str, Any] = field(default_factory=dict)  # the option of each group, and each value, by dotted key
    run: str | None = None  # the run's id, which its snapshots carry
    noise: Noise = field(default_factory=NotMeasured)
    skips: Skips = field(default_factory=lambda: Skips(None))

    def with_more_before(self, num_bytes: int) -> Session:
        """The same, as if malloc had allocated so many bytes more before the model was made: they don't count."""
        return self if self.malloc_bytes is None else replace(self, malloc_bytes=self.malloc_bytes + num_bytes)

    def begin(self, step: int, num_steps: int, untold: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tell the parent that the set-up is done and the steps begin.

        Args:
            untold: rows of `metrics.jsonl` up to `step` that earlier parents weren't told.
        """
        print(f"data: {self.data.description}")
        self.events(
            "begin",
            step=step,
            num_steps=num_steps,
            setup_s=self.age_s(),
            untold=list(untold),
            pid=os.getpid(),
            **parts_of(self.settings),
        )

    def growing(self) -> Session:
        """The same, with batches that grow as the schedule says. Their parts are at most as large as those of the
        largest batch, so that none takes more memory."""
        batch_size, parts = self.settings.train.batch_size, self.settings.groups["accum"].parts
        sizes = self.settings.groups["schedule"].sizes(batch_size)
        if sizes == self.sizes:
            return self
        return replace(self, sizes=sizes, rig=replace(self.rig, split=in_parts_of_largest(batch_size, parts)))

    def batches(self, first_step: int) -> TimedBatches:
        """The logical batches from `first_step` on, without end; each rank gets its slice."""
        loader: Loader = self.settings.groups["loader"]
        seed, device = self.settings.root.seed, self.rig.device
        return TimedBatches(loader.batches(self.data.train, self.sizes, seed, first_step, device), first_step)

    def largest(self, batches: TimedBatches, last: Part) -> Part:
        """The largest of the batches so far, made again; `last` if all have the same size."""
        if len(set(batches.sizes)) == 1:
            return last
        again = self.batches(batches.first_step + batches.sizes.index(max(batches.sizes)))
        try:
            return next(again)
        finally:
            again.close()

    def update(self, batch: Part, num_applied: int, num_steps: int) -> tuple[Tensor, Update]:
        """One step, at the schedule's learning rate after `num_applied` of `num_steps` updates.

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
        """The learning rate after `num_applied` updates: a skipped update doesn't advance the schedule."""
        schedule: Schedule = self.settings.groups["schedule"]
        return self.settings.groups["optimizer"].lr * schedule.factor(num_applied, num_steps, self.sizes)

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank, so that all end at the same step. A collective: all ranks must call
        it."""
        return all_ranks().any(flag)

    def remedy(self, num_targets: Tensor) -> str:
        """Advice against a loss that isn't finite. A collective: all ranks must call it.

        Args:
            num_targets: of this rank's slice of the batch (0-dim).
        """
        if not data_ranks().sum(num_targets.to(self.rig.device)):
            return f"{NO_TARGET}: leave such samples out of the data"
        smaller_lr = self.settings.groups["optimizer"].lr / 10
        return f"try a smaller learning rate (optimizer.lr={smaller_lr:g}) or stepping.clip=1.0"

    def age_s(self) -> float:
        """Seconds since the child began."""
        return time.monotonic() - self.started
