"""task=distill: the task that fits the data, with a teacher's predictions beside the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compress.distillation.cache import Cache, open_cache
from lowvram.compress.distillation.features import Compared, Features, Watched, counts_of
from lowvram.compress.distillation.matching import CHOSEN, WEIGHT, Matches, find_matches
from lowvram.compress.distillation.narrowing import NARROWING, Narrowing, fill_directions
from lowvram.compress.distillation.samples import taught
from lowvram.compress.distillation.soft import CachedSoftTargets, LiveSoftTargets, SoftLoss
from lowvram.compress.distillation.teacher import Teacher, TeacherFormat, find_teacher, width_of_logits
from lowvram.config.errors import BadInput, require
from lowvram.config.settings import Settings
from lowvram.core.probes.stated import HAS_SOFT_TARGETS, READS_BLOCKS
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.structure import Stating
from lowvram.core.values import materialise
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec
from lowvram.loops.train import Train
from lowvram.tasks import Auto, ModelConfig, Problem, TaskConfig


class CacheFormat(Enum):
    """The number format of a cache's values. The names are what a user types."""

    fp16 = "float16"
    fp32 = "float32"


@final
@dataclass(frozen=True)
class Distill(TaskConfig):
    """conf/task/distill.yaml"""

    teacher: str | None = None
    teacher_format: TeacherFormat = TeacherFormat.fp32
    alpha: float = 0.5
    temperature: float = 2.0
    cache: str | None = None
    feature_weight: float = 0.0
    features: list[int] | None = None
    top: int = 64
    values: CacheFormat = CacheFormat.fp16

    def __post_init__(self) -> None:
        require(
            0 <= self.alpha <= 1, "task.alpha", self.alpha, "at least 0 (targets alone) and at most 1 (teacher alone)"
        )
        require(0 < self.temperature <= 1000, "task.temperature", self.temperature, "above 0 and at most 1000")
        require(self.top >= 1, "task.top", self.top, "at least 1 class")
        check_features(self.feature_weight, self.features, self.cache)
        allowed = "a run's folder or a model of transformers; or give task.cache, which mode=teach has written"
        require(self.teacher is not None or self.cache is not None, "task.teacher", None, allowed)

    def check_paths(self) -> None:
        """Asked before any process starts, so it takes no torch."""
        is_there = self.cache is None or Path(self.cache).expanduser().is_dir()
        require(is_there, "task.cache", self.cache, "null, or the folder of a run with mode=teach")

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        plain = Auto().pose(model, spec)
        teacher = None if self.teacher is None else find_teacher(self.teacher, model, spec)
        cache = None if self.cache is None else open_cache(self.cache)
        num_classes = width_of_logits(plain)
        if teacher is not None:
            check_classes("task.teacher", self.teacher, teacher.num_classes(), num_classes)
        if cache is not None:
            self.check_cache(cache, teacher, num_classes)
        return Distilled(plain, self, teacher, cache)

    def check_cache(self, cache: Cache, teacher: Teacher | None, num_classes: int) -> None:
        """Raises BadInput if a cache is another teacher's, or was made otherwise."""
        about = cache.about
        check_classes("task.cache", self.cache, about.classes, num_classes)
        allowed = f"{about.temperature:g}, for which the cache was made: run mode=teach for another"
        require(about.temperature == self.temperature, "task.temperature", self.temperature, allowed)
        is_of = teacher is None or teacher.digest == about.teacher_digest
        allowed = f"a cache of the teacher {self.teacher}: this one is of other weights ({about.teacher})"
        require(is_of, "task.cache", self.cache, allowed)

    def attached(self, data: Data, settings: Settings) -> Data:
        if self.cache is None:
            return data
        train = settings.train
        sizes = settings.groups["schedule"].sizes(train.batch_size)
        num_wanted = sizes.before(train.steps) if isinstance(settings.groups["mode"], Train) else None
        return taught(data, open_cache(self.cache), settings.root.seed, num_wanted)


def check_features(weight: float, numbers: list[int] | None, cache: str | None) -> None:
    require(0 <= weight < inf, WEIGHT, weight, "at least 0 (0: blocks aren't compared)")
    allowed = "0 with task.cache, which holds predictions alone: leave task.cache out, so that the teacher runs"
    require(cache is None or weight == 0, WEIGHT, weight, allowed)
    is_list = numbers is None or (bool(numbers) and min(numbers) >= 0 and numbers == sorted(set(numbers)))
    allowed = "null (all) or a list of at least one number of a block, counted from 0 and rising"
    require(is_list, CHOSEN, numbers, allowed)


def check_classes(key: str, value: object, of_teacher: int, of_student: int) -> None:
    """Raises BadInput if teacher and student don't predict the same number of classes."""
    allowed = f"of a teacher with as many classes (of tokens: the same vocabulary) as the student, {of_student}: it has"
    require(of_teacher == of_student, key, value, f"{allowed} {of_teacher}")


@final
class Distilled(Problem):
    """The task `plain` with a teacher's predictions in its criterion. Those of a cache, if there is one, count instead
    of those of the teacher, which then isn't needed. Evaluations compare with targets alone."""

    def __init__(self, plain: Problem, config: Distill, teacher: Teacher | None, cache: Cache | None) -> None:
        super().__init__(plain.model, plain.spec)
        self.plain, self.config, self.teacher, self.cache = plain, config, teacher, cache
        self.matches = self.found_matches()

    def found_matches(self) -> Matches:
        """The calls of blocks whose outputs are compared; none without a weight."""
        weight, chosen = self.config.feature_weight, self.config.features
        if self.teacher is None or not weight:
            return {}
        return find_matches(self.plain, self.teacher.problem, weight, chosen)

    @property
    def description(self) -> str:
        of_teacher = None if self.teacher is None else self.teacher.description
        of_cache = None if self.cache is None else self.cache.about.key
        return repr((self.plain.description, self.config, of_teacher, of_cache))

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        hard = self.plain.criterion(outputs, part)
        if part.soft is None:
            return hard
        soft = SoftLoss.apply(outputs.flatten(0, -2), part.targets.flatten() != IGNORE, part.soft)
        return (1 - self.config.alpha) * hard + soft  # pyright: ignore[reportOperatorIssue]

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return self.plain.scores(loss, accuracy)

    def stated(self) -> Stating:
        has_matches = bool(self.matches)
        return {**self.plain.stated(), HAS_SOFT_TARGETS: lambda known: True, READS_BLOCKS: lambda known: has_matches}

    def with_teacher(self, rig: Rig) -> Rig:
        if self.cache is not None:
            return replace(rig, move=lambda part: self.with_cached(rig.move(part)))
        assert self.teacher is not None
        model = self.teacher.build(self.config.teacher_format, rig.device)
        asked = Asked(self.teacher.problem, model, self.config, self.matches)
        new = replace(rig, teacher=asked.model, move=lambda part: asked(rig.move(part)))
        if not self.matches:
            return new
        compared = Compared(rig.structure.blocks, self.matches)
        return replace(new, forward=partial(compared.forward, rig))

    def with_added_loss(self, rig: Rig) -> Rig:
        if not self.matches:
            return rig

        def criterion(outputs: Any, part: Part) -> Tensor:
            loss = rig.criterion(outputs, part)
            return loss if part.soft is None else loss + self.config.feature_weight * part.soft.features.loss()

        return replace(rig, criterion=criterion)

    def with_cached(self, part: Part) -> Part:
        return replace(part, soft=CachedSoftTargets(self.config.alpha, self.config.temperature, part.soft))

    def as_loaded(self, part: Part) -> Part:
        return part if self.cache is None else replace(part, soft=self.cache.empty(part.targets))


@final
class Asked:
    """A teacher on the device that adds what it predicts to a part. Its head waits for the criterion, which asks for
    few targets at a time."""

    def __init__(self, problem: Problem, model: nn.Module, config: Distill, matches: Matches) -> None:
        self.problem, self.model, self.config = problem, model, config
        blocks = problem.structure(model).blocks if matches else []
        narrowing = Narrowing(matches.values())
        if matches:
            materialise(narrowing, fill_directions, next(model.parameters()).device)
            model.add_module(NARROWING, narrowing)  # so that its memory counts with the teacher's
        self.watched = Watched(blocks, matches, narrowing)
        self.head = problem.structure(model).head
        if self.head is not None:
            self.head.forward = lambda input: input  # so the model returns hidden states

    @torch.no_grad()
    def __call__(self, part: Part) -> Part:
        outputs: Any = self.problem.call(self.model, part.inputs)
        if not isinstance(outputs, Tensor):
            allowed = f"a model that returns a tensor of logits: it returned a {type(outputs).__name__}"
            raise BadInput("task.teacher", self.config.teacher, allowed)
        soft = LiveSoftTargets(self.config.alpha, self.config.temperature, outputs, self.head, self.features_of(part))
        return replace(part, soft=soft)

    def features_of(self, part: Part) -> Features | None:
        """What the blocks have just returned; None if none is compared."""
        states = self.watched.taken()
        return Features(states, counts_of(part, self.problem.spec.modality)) if states else None
