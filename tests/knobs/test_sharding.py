"""Several ranks against one process at the same logical batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.core.ranks import num_ranks, rank
from lowvram.core.rig import Part, assemble
from lowvram.core.shards import whole
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from tests.laboratory import CPU, PROBLEMS, InDouble, batches, knobs_of, relative_error
from tests.ranks import on_ranks

STEPS = 20
SIZES = [32] * (STEPS - 1) + [27]  # the last batch divides by nothing
OPTIONS = ["ddp", "fsdp"]


def my_slice(batch: Part) -> Part:
    return Parts(num_ranks()).split(batch)[rank()] if num_ranks() > 1 else batch


def trained(problem: str, dtype: torch.dtype, choices: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each step, and all parameters and buffers afterwards."""
    task = InDouble(PROBLEMS[problem]) if dtype is torch.float64 else PROBLEMS[problem]
    rig = assemble(task, knobs_of(**choices), CPU)
    losses = [step(rig, my_slice(batch))[0] for batch in batches(task.spec, SIZES, dtype)]
    return torch.stack(losses), {name: whole(tensor) for name, tensor in rig.model.state_dict().items()}


CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accum": {"accum": "x4"},
    "every2": {"ckpt": "every2"},
    "sgd": {"optimizer": "sgd", "accum": "x2"},
}


@pytest.mark.parametrize("problem", ["transformer", "resnet_group", "resnet_frozen"])
@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_with_unequal_targets_train_like_one_process(option: str, problem: str) -> None:
    """In fp64 20 steps of each lie within 1e-10 in losses and parameters, on every rank."""
    found = on_ranks(train_all, problem, torch.float64, option)
    for each in found:
        for name, wanted in train_all(problem, torch.float64, "none").items():
            losses, tensors = each[name]
            assert relative_error({"": losses}, {"": wanted[0]}) < 1e-10, name
            assert relative_error(tensors, wanted[1]) < 1e-10, name


def train_all(problem: str, dtype: torch.dtype, option: str) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {name: trained(problem, dtype, {**chosen, "sharding": option}) for name, chosen in CHOICES.items()}


def test_without_whole_params() -> None:
    pass
