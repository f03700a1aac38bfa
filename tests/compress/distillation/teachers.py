"""Distilled problems with tiny teachers, without a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lowvram.compress.distillation.task import Distill, Distilled
from lowvram.compress.distillation.teacher import Teacher
from lowvram.core.assemble import assemble
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.models.resnet import NormKind
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER, InDouble, knobs_of, make_batch

TEACHERS: dict[str, Problem] = {  # larger than the problems of the same names
    "transformer": Auto().pose(replace(TRANSFORMER, width=24), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16), IMAGES),
}
DEEPER: dict[str, Problem] = {  # as wide as the problems of the same names
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=5), TOKENS),
    "resnet": Auto().pose(replace(RESNET, layers=[3, 3]), IMAGES),
    "resnet_group": Auto().pose(replace(RESNET, layers=[3, 3], norm=NormKind.group), IMAGES),
}
FAR = 0.7, 3.0  # alpha and temperature, neither of them special


def teacher_of(problem: Problem, seed: int = 0) -> Teacher:
    """A teacher with random weights: those with which a student of this problem begins, given this seed."""
    trained = (lambda: assemble(problem, knobs_of(), CPU, seed).model) if seed else None
    return Teacher("a test's", problem, trained, "digest")


def distilled(student: str | Problem, teacher: Problem | None = None, seed: int = 0, **values: Any) -> Distilled:
    """A problem, or that of this name of `PROBLEMS`, with a teacher: by default the larger one of the same name."""
    alpha, temperature = FAR
    config = Distill(**{"teacher": "a test's", "alpha": alpha, "temperature": temperature, **values})
    plain = PROBLEMS[student] if isinstance(student, str) else student
    return Distilled(plain, config, teacher_of(teacher or TEACHERS[str(student)], seed), None)


def rig_after_steps(task: Distilled, sizes: Iterable[int]) -> Rig:
    """The task's rig after steps on so many samples, which leave the teacher as it was, without gradients, and the
    student's weights with their names."""
    rig = assemble(task, knobs_of(), CPU)
    assert rig.teacher is not None
    before = {name: tensor.clone() for name, tensor in rig.teacher.state_dict().items()}
    for size in sizes:
        step(rig, make_batch(task.spec, size))
    assert all(torch.equal(before[name], tensor) for name, tensor in rig.teacher.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in rig.teacher.parameters())
    assert not {*rig.teacher.modules()} & {*rig.model.modules()}
    assert rig.model.state_dict().keys() == assemble(task.plain, knobs_of(), CPU).model.state_dict().keys()
    return rig


class InDoubleWithTeacher(InDouble):
    """Student and teacher in fp64."""

    def with_teacher(self, rig: Rig) -> Rig:
        rig = self.problem.with_teacher(rig)
        assert rig.teacher is not None
        rig.teacher.double()
        return rig

    def with_added_loss(self, rig: Rig) -> Rig:
        return self.problem.with_added_loss(rig)
