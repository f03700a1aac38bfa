"""mode=train: all steps, with evaluations and snapshots; the weights are saved at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lowvram.config.errors import Incompatible
from lowvram.config.transforms import ExportedWeights
from lowvram.core import generators
from lowvram.core.knob import weights_per_scale
from lowvram.core.loss_parts import LossState
from lowvram.core.mesh import all_ranks, stage_hosts
from lowvram.core.phases import BETWEEN
from lowvram.core.rig import Part
from lowvram.core.savable import Savable
from lowvram.core.shards import is_sharded_alike
from lowvram.core.states import Frozen, load_whole, trained_state
from lowvram.core.stepper import Update
from lowvram.data.loader import TimedBatches
from lowvram.loops import fields, origins
from lowvram.loops.ending import MAX_HOURS, PATIENCE, STEPS, Best, Hours, said_end
from lowvram.loops.evaluate import Evaluation, evaluate
from lowvram.loops.export.folder import check_format, check_free
from lowvram.loops.exported import export_weights, exported_weights, take_best
from lowvram.loops.metrics_log import MetricsLog
from lowvram.loops.origins import origins_of
from lowvram.loops.profiling.clock import clock_for
from lowvram.loops.profiling.compile_time import CompileTimes, chosen, compile_seconds
from lowvram.loops.profiling.malloc import allocated_bytes, grown_bytes
from lowvram.loops.profiling.post_run import post_run, run_peaks
from lowvram.loops.rescue import Posts, WholeStep, save_alone
from lowvram.loops.session import NO_TARGET, Interrupted, NonFinite, Session
from lowvram.loops.shard_files import Like
from lowvram.loops.skipping import ALL_SKIPPED
from lowvram.loops.snapshot import Snapshots, check_form, differences, fitting, my_random_state
from lowvram.loops.unregistered import Unregistered
from lowvram.models.layout import EXPORTED
from lowvram.results.files.run_folder import SNAPSHOTS

FIRST_HELD, HELD_EVERY = 2, 10  # logged steps at which the memory held is read: the first ones, and every tenth
SETTLING_STEPS = 2  # the first steps, which aren't timed: the optimizer's state is made in the first


@final
@dataclass(frozen=True)
class Train:
    """conf/mode/train.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        check_free(session.folder / EXPORTED)
        group = weights_per_scale(session.knobs.values())
        check_format(session.settings.export.format, group, session.problem)
        exported_weights(session)
        session = session.growing()
        with MetricsLog(session.folder, session.events) as log:
            return self.run_steps(session, TrainingRun(session, log))

    def run_steps(self, session: Session, run: TrainingRun) -> dict[str, Any]:
        """All steps that are left, and the end; returns the row's fields."""
        settings = session.settings
        batches, clock = session.batches(run.step), clock_for(session.rig.device)
        with session.stop.defer_interrupts():  # from before the steps are told: who hears of them may stop the run
            run.begin()
            run.make_up()
            while run.ended_by() is None:
                with run.rescuing(f"step {run.step + 1}"):
                    clock.mark("step")
                    batch = next(batches)
                    with run.compiling.step():
                        stepped = run.stepped(batch)
                    clock.mark(BETWEEN)
                run.count(stepped, batch)
                if is_due(run.step, settings.train.eval_every):
                    with run.rescuing(f"the evaluation after step {run.step}"):
                        run.evaluate()
                if is_due(run.step, settings.snapshot.every_steps) or run.best.is_step(run.step):
                    run.save()
                if session.agree(session.stop.requested):
                    run.save()
                    raise Interrupted(f"stopped after step {run.step} of {settings.train.steps}")
        return run.finish(batches, clock.laps_ms("step"))


def is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class TrainingRun:
    """The state of a run, and what happens between its steps: counting, logging, evaluations, snapshots."""

    def __init__(self, session: Session, log: MetricsLog) -> None:
        self.session, self.metrics_log = session, log
        keep, above_bytes = session.settings.snapshot.keep, session.settings.snapshot.sharded_above_bytes
        self.best, self.hours = Best.of(session), Hours(session.settings.train.max_hours)
        self.snapshots = Snapshots(session.folder / SNAPSHOTS, keep, session.run, above_bytes, self.best.is_step)
        self.step = self.num_applied = self.saved_step = 0
        self.first_loss = self.last_loss = math.nan
        self.first_loss_step = self.last_loss_step = 0
        self.has_told_skip = False
        self.begun_at = 0
        self.evaluation: tuple[int, Evaluation] | None = None  # with the step after which it was made
        self.random: dict[str, Any] | None = None
        self.origins: dict[str, Any] | None = None  # once they are asked for
        self.owes_evaluation = False  # whether the evaluation after the snapshot's step was due, and has failed
        self.num_targets = torch.tensor(0)  # of the last step
        self.token_counts: list[Tensor] = []  # `Problem.token_counts` of each step of this process
        self.compiling = CompileTimes()
        self.logged_at, self.logged_step, self.logged_compile_s = time.monotonic(), 0, compile_seconds()
        self.frozen = Frozen(session.rig.model)
        self.unregistered, self.has_told_loss = Unregistered(session.rig.model), False
        parts_of_loss = session.problem.loss_parts()
        self.loss_state = LossState(parts_of_loss) if parts_of_loss is not None else None
        self.savable = Savable(self.formed_state(), session.rig.model.state_dict())
        check = partial(check_form, self.formed_state())
        state = self.snapshots.load(check, self.like) if session.is_resumed else None
        if state is not None:
            with fitting(session.folder):
                self.restore(state)

    def begin(self) -> None:
        """Tell the parent that steps begin. Call it right before the first step: it restores the random state, so
        nothing may draw random numbers in between."""
        if self.random is not None:
            with fitting(self.session.folder):
                generators.load(self.random)
                self.unregistered.load(self.random.get("unregistered", {}))  # an early version of lowvram saved none
        first, last = (self.first_loss_step, self.first_loss), (self.last_loss_step, self.last_loss)
        known = [first, last] if self.last_loss_step else []
        rows = [{"step": step, "loss/train": loss} for step, loss in known]
        untold = self.metrics_log.begin(self.step, rows)
        self.session.begin(self.step, self.session.settings.train.steps, untold)
        self.hours.begin()
        self.logged_at = time.monotonic()

    def make_up(self) -> None:
        """Make the evaluation after the step where the run goes on, if it was due and failed."""
        if self.owes_evaluation and self.step < self.session.settings.train.steps:
            self.evaluate()

    def ended_by(self) -> str | None:
        """Why no step follows; None if one does. A collective: all ranks must call it."""
        if self.step >= self.session.settings.train.steps:
            return STEPS
        if self.best.is_over:
            return PATIENCE
        return MAX_HOURS if self.step and self.hours.is_over() else None

    @contextmanager
    def rescuing(self, following: str) -> Iterator[None]:
        """Around what follows the last whole step: if it fails, that step is saved, if that is still possible."""
        whole, held = WholeStep(self.step, self.session.rig.model, following), self.unregistered.before_step()
        try:
            yield
        except Interrupted:
            raise
        except BaseException as error:
            save = self.save_alone if all_ranks().size > 1 else self.save
            whole.rescue(error, self.saved_step, partial(save, held=held))
            raise

    def stepped(self, batch: Part) -> tuple[Tensor, Update] | None:
        """The loss and the update of one step; None, and no update, for a batch without a target that counts."""
        self.num_targets = self.session.problem.num_targets(batch)
        if self.session.agree(bool(self.num_targets)):
            return self.session.update(batch, self.num_applied, self.session.settings.train.steps)
        if not self.has_told_skip:
            self.has_told_skip = True
            print(f"step {self.step + 1}: {NO_TARGET}: no update; further such batches are skipped without a word")
        return None

    def count(self, stepped: tuple[Tensor, Update] | None, batch: Part) -> None:
        """Count one more step, and log it if that is due and it had a loss."""
        settings = self.session.settings.train
        lr = self.session.lr(self.num_applied, settings.steps)
        self.step += 1
        self.token_counts.append(self.session.problem.token_counts(batch))
        if stepped is None or self.session.skips.has_skipped(stepped[1], self.step):
            return
        if is_power_of_2(self.step - self.saved_step) and self.saved_step == self.begun_at:
            self.savable.check(self.formed_state(), self.step)
        loss, update = stepped
        self.num_applied += update.applied
        if self.step in (1, settings.steps) or is_due(self.step, settings.log_every):
            self.last_loss, self.last_loss_step = loss.item(), self.step
            if math.isnan(self.first_loss):
                self.first_loss, self.first_loss_step = self.last_loss, self.step
            values = {"loss/train": self.last_loss, "grad_norm": float(update.grad_norm), "lr": lr}
            self.log(values | self.session.noise.metrics())

    def log(self, values: dict[str, float]) -> None:
        """Write one row of metrics.jsonl, with the throughput since the last row, not counting the time to compile.

        Raises:
            NonFinite: the loss is not finite.
        """
        if not math.isfinite(self.last_loss):
            remedy = self.session.remedy(self.num_targets)
            raise NonFinite(f"the loss of step {self.step} is {self.last_loss}: {remedy}")
        now = time.monotonic()
        steps = self.step - self.logged_step
        compile_s = compile_seconds()
        seconds = now - self.logged_at - (compile_s - self.logged_compile_s)
        num_samples = self.session.sizes.before(self.step) - self.session.sizes.before(self.logged_step)
        pace = fields.pace(self.session, self.token_counts[-steps:], seconds, num_samples)
        memory = fields.memory_now(self.session)
        if self.step <= FIRST_HELD or is_due(self.step, HELD_EVERY * self.session.settings.train.log_every):
            memory |= fields.memory_held(self.session)
        reading_s = time.monotonic() - now  # counts for no step
        with self.rescuing(f"the log of step {self.step}"):
            self.metrics_log.write(self.step, values | pace | memory | self.session.sizes.logged(self.step))
        self.logged_at, self.logged_step, self.logged_compile_s = now + reading_s, self.step, compile_s

    @property
    def is_evaluated(self) -> bool:
        return self.evaluation is not None and self.evaluation[0] == self.step

    def evaluate(self) -> Evaluation:
        """Evaluate after the last step, unless that was done."""
        if self.evaluation is None or not self.is_evaluated:
            self.evaluation = (self.step, evaluate(self.session))
            metrics = self.evaluation[1].metrics()
            self.metrics_log.write(self.step, metrics)
            self.best.observe(self.step, metrics)
        return self.evaluation[1]

    def save(self, random: dict[str, Any] | None = None, held: dict[str, Any] | None = None) -> bool:
        """Save a snapshot after the last step, unless that was done. Rank 0 writes it, once the rows of its steps are
        on disk. A collective: all ranks must call it.

        Args:
            random: the random state after the step; None: the present one.
            held: what modules kept after the step; None: what they keep.
        """
        if self.saved_step != self.step:
            self.frozen.agree()
            if not self.savable.check(self.formed_state(), self.step):
                return False
            randoms = all_ranks().gather(self.with_unregistered(random or generators.saved(), held))
            path = self.snapshots.save_together(self.step, self.state(randoms), self.metrics_log.state)
            if path is not None:
                self.tell(path)
            self.saved_step = self.step
        elif all_ranks().is_first:
            self.snapshots.forget_older()
        return True

    def with_unregistered(self, random: dict[str, Any], held: dict[str, Any] | None) -> dict[str, Any]:
        """A random state with what modules keep in attributes. Tells once what can't be saved."""
        if not self.has_told_loss and all_ranks().is_first and (told := self.unregistered.told()) is not None:
            print(told)
            self.has_told_loss = True
        return random | {"unregistered": held or self.unregistered.state()}

    def save_alone(self, random: dict[str, Any], held: dict[str, Any] | None) -> bool:
        """The same, of one of several ranks that has failed, as other ranks may have; returns whether it has written
        the snapshot, as the last one. Raises Incompatible in a pipeline, whose ranks have parts of the state."""
        if stage_hosts() is not None:
            raise Incompatible("sharding=pipeline saves all stages together, and one has failed")
        if not self.savable.check(self.formed_state(), self.step):
            return False
        post = {"random": self.with_unregistered(random, held), "log": self.metrics_log.state()}
        path = save_alone(Posts(self.session.folder, self.step), self.snapshots, self.step, self.state([]), post)
        if path is not None:
            self.tell(path)
        return path is not None

    def tell(self, path: Path) -> None:
        self.session.events("snapshot", step=self.step, path=str(path))

    def state(self, randoms: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything that the next step depends on. The position in the data follows from the step, their order from
        the seed.

        Args:
            randoms: the random state of each rank.
        """
        return {
            "step": self.step,
            "num_applied": self.num_applied,
            "first_loss": self.first_loss,
            "first_loss_step": self.first_loss_step,
            "last_loss": self.last_loss,
            "last_loss_step": self.last_loss_step,
            "switched": self.frozen.switched(),
            "owes_evaluation": is_due(self.step, self.session.settings.train.eval_every) and not self.is_evaluated,
            "random": randoms,
            "noise": self.session.noise.state(),
            "origins": self.begun_with(),
            "best": self.best.state(),
            "hours": self.hours.state(),
            "skips": self.session.skips.state(),
            "loss": {} if self.loss_state is None else self.loss_state.state(),
            **self.formed_state(),
        }

    def begun_with(self) -> dict[str, Any]:
        """The data and the frozen weights, of which snapshots hold checksums alone."""
        if self.origins is None:
            self.origins = origins_of(self.session.data, self.session.rig.model, self.frozen.unchanged())
        return self.origins

    def formed_state(self) -> dict[str, Any]:
        """The part of `state` whose names and shapes depend on the configuration."""
        rig = self.session.rig
        return {
            "chosen": dict(self.session.chosen),
            "model": trained_state(rig.model, self.frozen.unchanged()),
            "stepper": rig.stepper.state_dict(),
        }

    def like(self) -> Like:
        """How the state is sharded, as far as it is known before the optimizer has made its own: as its parameters, if
        these are all sharded alike."""
        updated, model = self.session.rig.updated, self.session.rig.model.state_dict()
        return {"model": model, "stepper": updated[0]} if is_sharded_alike(updated) else {"model": model}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; `begin` sets the random state."""
        if changed := differences(self.session.chosen, state.get("chosen", {})):
            print(f"going on with other values: {', '.join(changed)}")
        if saved := state.get("origins"):  # an early version of lowvram saved none
            for line in origins.differences(self.begun_with(), saved):
                print(line)
        self.frozen.switch(state.get("switched", {}))  # an early version of lowvram saved none
        load_whole(self.session.rig.model, state["model"])
        self.session.rig.stepper.load_state_dict(state["stepper"])
        if self.loss_state is not None:
            self.loss_state.load(state.get("loss", {}))  # an early version of lowvram saved none
        self.step = self.saved_step = self.logged_step = self.begun_at = index(state["step"])
        self.num_applied, self.random = index(state["num_applied"]), my_random_state(state["random"])
        self.first_loss, self.last_loss = float(state["first_loss"]), float(state["last_loss"])
        self.first_loss_step = index(state.get("first_loss_step", 1))  # the same as below
        self.last_loss_step = index(state.get("last_loss_step", 0))  # an early version of lowvram saved none
        self.owes_evaluation = bool(state.get("owes_evaluation", False))  # the same
        self.metrics_log.restore(state)
        self.session.noise.restore(state.get("noise", {}))  # the same
        for kept, name in ((self.best, "best"), (self.hours, "hours"), (self.session.skips, "skips")):
            kept.restore(state.get(name, {}))  # the same
        if self.best.step is not None and not self.snapshots.has(self.best.step):
            self.best.forget()

    def take_exported(self) -> int:
        """Load the weights that are to be exported; returns after which step they were the run's. A collective."""
        best = self.best.step
        if self.session.settings.export.of is not ExportedWeights.best or best == self.step:
            return self.step
        saved = None if best is None else self.snapshots.of_step(best, self.like)
        with fitting(self.session.folder):
            is_taken = take_best(self.session.rig.model, saved, self.formed_state()["model"], best, self.step)
        return best if best is not None and is_taken else self.step

    @contextmanager
    def weights_at_least(self) -> Iterator[None]:
        """Around the last snapshot: if it can't be saved, the weights are exported before the run ends."""
        try:
            yield
        except Exception:
            export_weights(self.session)
            raise

    def finish(self, batches: TimedBatches, step_ms: list[float]) -> dict[str, Any]:
        """Make the last snapshot, evaluation and export, then measure with `post_run`, which would disturb them; return
        the row's fields. What the export takes is no part of the run's memory."""
        timed = self.compiling.steady(SETTLING_STEPS)
        waits_s, token_counts = chosen(batches.waits_s, timed), chosen(self.token_counts, timed)
        num_samples = sum(self.session.sizes.at(batches.first_step + index) for index in timed)
        ended_by = said_end(self.ended_by(), self.step, self.session.settings.train)
        with self.weights_at_least():
            self.save()  # first, so that interrupting the evaluation loses nothing
        if self.step and not self.last_loss_step:
            raise NonFinite(f"no step had a loss: {ALL_SKIPPED if self.session.skips.num else NO_TARGET}")
        evaluation = self.evaluate()
        peaks, malloc_bytes = run_peaks(self.session), allocated_bytes()
        ending = {"steps": self.step, "ended_by": ended_by, "exported_step": self.take_exported()}
        exported = export_weights(self.session)
        measured = self.session.with_more_before(grown_bytes(malloc_bytes))
        return fields.merged(
            fields.trained(self.session),
            fields.losses(self.first_loss, self.last_loss, evaluation),
            exported,
            {"training": ending | self.best.fields()},
            fields.times(self.session, chosen(step_ms, timed), waits_s, token_counts, num_samples),
            fields.of_data(self.session),
            post_run(measured, batches, peaks),
        )
