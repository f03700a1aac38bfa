"""Ranks against one process at the same batch, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from lowvram.core.knob import Knob
from tests.knobs.test_sharding import THREE, errors, train_each
from tests.laboratory import InDouble
from tests.ranks import on_ranks

Choices = dict[str, str | Knob]
Mesh = tuple[Any, int, Knob]  # a problem, the number of ranks, and how these share it


def check_like_one_process(mesh: Mesh, many: list[Choices]) -> None:
    """Three steps with each of many choices: losses, gradients, norms and parameters of every rank."""
    problem, num_ranks, knob = mesh
    task = InDouble(problem)
    wanted = train_each(task, many, THREE)
    choices = [{**each, "sharding": knob} for each in many]
    for found in on_ranks(train_each, task, choices, THREE, num_ranks=num_ranks):
        for one, other in zip(found, wanted, strict=True):
            error = errors(one, other)
            assert max(error["losses"], error["gradients"]) < 1e-12
            assert error["parameters"] < 1e-10
            norms = [[float(update.grad_norm or 0) for update in each.updates] for each in (one, other)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-12)
