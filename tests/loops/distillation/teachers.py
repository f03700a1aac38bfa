"""Distilled problems with tiny teachers, without a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowvram.core.rig import Rig
from lowvram.loops.distillation.task import Distill, Distilled
from lowvram.loops.distillation.teacher import Teacher
from lowvram.tasks import Auto, Problem
from tests.laboratory import IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER, InDouble

TEACHERS: dict[str, Problem] = {  # larger than the problems of the same names
    "transformer": Auto().pose(replace(TRANSFORMER, width=24), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16), IMAGES),
}
FAR = 0.7, 3.0  # alpha and temperature, neither of them special


def teacher_of(problem: Problem) -> Teacher:
    """A teacher with random weights: those with which a student of this problem begins."""
    return Teacher("a test's", problem, None, "digest")


def distilled(student: str | Problem, teacher: Problem | None = None, **values: Any) -> Distilled:
    """A problem, or that of this name of `PROBLEMS`, with a teacher: by default the larger one of the same name."""
    alpha, temperature = FAR
    config = Distill(**{"teacher": "a test's", "alpha": alpha, "temperature": temperature, **values})
    plain = PROBLEMS[student] if isinstance(student, str) else student
    return Distilled(plain, config, teacher_of(teacher or TEACHERS[str(student)]), None)


class InDoubleWithTeacher(InDouble):
    """Student and teacher in fp64."""

    def with_teacher(self, rig: Rig) -> Rig:
        rig = self.problem.with_teacher(rig)
        assert rig.teacher is not None
        rig.teacher.double()
        return rig
