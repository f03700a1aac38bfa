"""mode=measure: warms up, then times some steps. The steps are those of training; no weights are saved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lowvram.config.errors import require
from lowvram.core.stepper import Update
from lowvram.data.loader import TimedBatches
from lowvram.loops import fields
from lowvram.loops.evaluate import evaluate
from lowvram.loops.metrics_log import MetricsLog
from lowvram.loops.profiling.clock import clock_for, synchronise
from lowvram.loops.profiling.compile_time import CompileTimes, chosen
from lowvram.loops.profiling.disturbance import disturbance, watch_for
from lowvram.loops.profiling.post_run import post_run
from lowvram.loops.session import NonFinite, Session


@final
@dataclass(frozen=True)
class Measure:
    """conf/mode/measure.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        require(not session.is_resumed, "mode", "measure", "train: only a run with snapshots can be resumed")
        with MetricsLog(session.folder, session.events) as log:
            return self.measured(session, log)

    def measured(self, session: Session, log: MetricsLog) -> dict[str, Any]:
        """The row's fields."""
        limits, device = session.settings.measure, session.rig.device
        batches, clock, history = session.batches(0), clock_for(device), History(session, log)
        session.begin(0, limits.warmup_steps + limits.steps, log.begin())
        for _ in range(limits.warmup_steps):  # the first step makes the optimizer's state
            history.step(batches)
        synchronise(device)
        watch = watch_for(device)
        num_steps, end = limits.warmup_steps + limits.steps, time.monotonic() + limits.max_seconds
        while history.num_steps < num_steps and not session.agree(time.monotonic() > end):
            with clock.lap("step"):
                history.step(batches)
        synchronise(device)
        step_ms, losses = clock.laps_ms("step"), history.log()
        timed_ms, waits_s, token_counts = history.timed(step_ms, batches.waits_s)
        disturbed = disturbance(watch, timed_ms, token_counts)
        return fields.merged(
            fields.common(session),
            fields.losses(losses[0], losses[-1], evaluate(session)),
            fields.times(session, timed_ms, waits_s, token_counts),
            fields.of_data(session),
            disturbed,
            {"time": {"is_cut": len(step_ms) < limits.steps}},
            post_run(session, batches),
        )


class History:
    """The steps of a measurement. Losses stay on the device until `log`, so that no step waits for the device."""

    def __init__(self, session: Session, log: MetricsLog) -> None:
        self._session, self._log = session, log
        self._steps: list[tuple[Tensor, Update]] = []
        self._num_applied = 0
        self._num_targets: list[Tensor] = []
        self._token_counts: list[Tensor] = []
        self._compiling = CompileTimes()

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def step(self, batches: TimedBatches) -> None:
        limits = self._session.settings.measure
        batch = next(batches)
        self._num_targets.append(self._session.problem.num_targets(batch))
        self._token_counts.append(self._session.problem.token_counts(batch))
        with self._compiling.step():
            loss, update = self._session.update(batch, self._num_applied, limits.warmup_steps + limits.steps)
        self._num_applied += update.applied
        self._steps.append((loss, update))
        self._session.events("progress", step=self.num_steps, values={})

    def timed(self, window_ms: list[float], waits_s: list[float]) -> tuple[list[float], list[float], list[Tensor]]:
        """Times, waits for data and token counts of those timed steps in which nothing was compiled.

        Args:
            window_ms: of each step after the warm-up.
            waits_s: of all steps.
        """
        warmup = self._session.settings.measure.warmup_steps
        steady = self._compiling.steady(warmup)
        step_ms = [window_ms[index - warmup] for index in steady]
        return step_ms, chosen(waits_s, steady), chosen(self._token_counts, steady)

    def log(self) -> Sequence[float]:
        """Write a row of metrics.jsonl for every step; returns the losses.

        Raises:
            NonFinite: a loss is not finite.
        """
        losses = torch.stack([loss for loss, _ in self._steps]).tolist()
        for number, (loss, (_, update)) in enumerate(zip(losses, self._steps, strict=True), start=1):
            if update.skipped:
                continue
            if not math.isfinite(loss):
                remedy = self._session.remedy(self._num_targets[number - 1])
                raise NonFinite(f"the loss of step {number} is {loss}: {remedy}")
            self._log.write(number, {"loss/train": loss, "grad_norm": float(update.grad_norm)}, is_late=True)
        return losses
