"""mode=teach: asks the teacher about the samples of a run, and writes a cache of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch

from lowvram.compress.distillation.cache import ABOUT, FOLDER, INDEX, About, Writer
from lowvram.compress.distillation.matching import WEIGHT
from lowvram.compress.distillation.samples import check_rows, collated, described
from lowvram.compress.distillation.soft import Likeliest, LiveSoftTargets
from lowvram.compress.distillation.task import Distilled
from lowvram.config.errors import BadInput, require
from lowvram.core.ledger import ledger
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import IGNORE, Part
from lowvram.core.soft_targets import ROWS
from lowvram.data.randomness import Key
from lowvram.loops import fields
from lowvram.loops.profiling.clock import clock_for, synchronise
from lowvram.loops.profiling.post_run import run_peaks
from lowvram.loops.session import Session
from lowvram.results.files import manifest
from lowvram.results.files.durable import unfinished_folder
from lowvram.results.row import size_text


@final
@dataclass(frozen=True)
class Teach:
    """conf/mode/teach.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        problem, target = checked(session), session.folder / FOLDER
        mend = f"mode=teach can't be resumed: run it in another folder, such as hydra.run.dir={session.folder}_again"
        manifest.ours_in(target, (ABOUT, INDEX), mend)  # raises now, not after hours, if something is in the way
        batches = list(batches_of(session))
        clock, token_counts = clock_for(session.rig.device), list[torch.Tensor]()
        session.begin(0, len(batches))
        with unfinished_folder(target) as fresh:
            writer = Writer(fresh, problem.config.values.value)
            for number, keys in enumerate(batches, start=1):
                with clock.lap("step"):
                    token_counts.append(add(session, problem, writer, keys))
                session.events("progress", step=number, values={})
            about = writer.finish(about_cache(session, problem, writer))
            manifest.put(fresh, target, mend)
        synchronise(session.rig.device)
        num_bytes = about.num_targets * about.bytes_per_target
        print(
            f"cache: {about.num_samples} samples, {about.num_targets} targets of {about.bytes_per_target} bytes each:"
        )
        print(f"  {size_text(num_bytes)} in {target}")
        step_ms = clock.laps_ms("step")
        return fields.merged(
            fields.common(session),
            fields.times(session, step_ms, [0.0] * len(step_ms), token_counts),
            {"memory": {**run_peaks(session), **peak_of(session, problem, batches[0])}},
        )


def checked(session: Session) -> Distilled:
    """The task. Raises BadInput if there is no teacher to ask, or if this isn't how to ask it."""
    problem, config = session.problem, session.settings.groups["task"]
    if not isinstance(problem, Distilled):
        raise BadInput("mode", "teach", "train, unless task=distill names a teacher")
    allowed = "null with mode=teach, which writes a cache into its own folder"
    require(problem.cache is None, "task.cache", config.cache, allowed)
    allowed = "0 with mode=teach, which keeps predictions alone"
    require(not config.feature_weight, WEIGHT, config.feature_weight, allowed)
    require(not session.is_resumed, "mode", "teach", "train: only a run with snapshots can be resumed")
    require(all_ranks().size == 1, "sharding.ranks", all_ranks().size, "1 with mode=teach")
    check_rows(session.data.spec, "with mode=teach, which asks about samples, not rows")
    return problem


def batches_of(session: Session) -> Iterator[list[Key]]:
    """The keys of those samples that as many steps of training would read, in parts."""
    train, root = session.settings.train, session.settings.root
    num_samples = session.settings.groups["schedule"].sizes(train.batch_size).before(train.steps)
    keys = islice(session.data.train.keys(root.seed, 0), num_samples)
    part_size = -(-train.batch_size // session.settings.num_parts)
    while some := list(islice(keys, part_size)):
        yield some


@torch.no_grad()
def add(session: Session, problem: Distilled, writer: Writer, keys: list[Key]) -> torch.Tensor:
    """Ask about some samples; returns `Problem.token_counts`."""
    part = collated(session.data.train, keys)
    writer.add(keys, part, answers(session, part, problem.config.top))
    return problem.token_counts(part)


def answers(session: Session, part: Part, top: int) -> Likeliest:
    """The teacher's likeliest classes of those targets of a part that count."""
    moved = session.rig.move(part)
    soft: LiveSoftTargets = moved.soft
    counts_n = moved.targets.flatten() != IGNORE
    pieces = [
        Likeliest(*(each[counts_n[first : first + ROWS]] for each in few(soft, first, top)))
        for first in range(0, len(counts_n), ROWS)
    ]
    return Likeliest(*(torch.cat(each) for each in zip(*pieces, strict=True)))


def few(soft: LiveSoftTargets, first: int, top: int) -> Likeliest:
    log_q_sv = soft.log_probabilities(slice(first, first + ROWS), torch.float32)
    return Likeliest.of(log_q_sv, min(top, log_q_sv.shape[-1]))


def about_cache(session: Session, problem: Distilled, writer: Writer) -> About:
    config, teacher = problem.config, problem.teacher
    assert teacher is not None
    classes = teacher.num_classes()
    return About(
        teacher=teacher.name,
        teacher_digest=teacher.digest,
        teacher_format=config.teacher_format.name,
        data=described(session.data.spec),
        num_train=len(session.data.train),
        seed=session.settings.root.seed,
        num_samples=len(writer.lines),
        num_targets=writer.num_targets,
        classes=classes,
        top=min(config.top, classes),
        values=config.values.value,
        temperature=config.temperature,
    )


def peak_of(session: Session, problem: Distilled, keys: list[Key]) -> dict[str, Any]:
    """The memory of asking about one part, on a CPU, by kind."""
    rig, part = session.rig, collated(session.data.train, keys)
    if rig.device.type == "cuda":
        return {}
    with torch.no_grad(), ledger(rig.model, rig.stepper, part.tensors(), rig.device, teacher=rig.teacher) as peak:
        answers(session, part, problem.config.top)
    by_kind = {kind.value: num_bytes for kind, num_bytes in peak.by_kind.items()}
    return {"by_kind": by_kind, "peak_bytes": peak.peak_bytes, "source": "tensor_ledger"}
