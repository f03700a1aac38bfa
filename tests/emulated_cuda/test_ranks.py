"""Two and four CUDA devices, emulated or real, train through NCCL as one process on the CPU does: cases of
tests/knobs/test_sharding*.py and test_stepping_ranks.py, within their tolerances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.core.knob import Knob
from tests.emulated_cuda.configurations import CUDA
from tests.knobs import test_sharding_context, test_sharding_pipeline, test_sharding_sequence, test_sharding_tensor
from tests.knobs.test_sharding import CLIPPED, COPIES, OPTIONS, THREE, TWENTY_STEPS, errors
from tests.knobs.test_sharding_pipeline import PIPELINES, together
from tests.knobs.test_stepping_ranks import CASES
from tests.laboratory import IS_EMULATED, PROBLEMS, InDouble, Trained, knobs_of, train
from tests.ranks import on_cards

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.emulated,
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="fewer than two CUDA devices"),
]
Choices = dict[str, str | Knob]


def train_on_card(task: InDouble, choices: list[Choices]) -> list[Trained]:
    return [on_cpu(train(task, knobs_of(**each), THREE, device=CUDA)) for each in choices]


def on_cpu(trained: Trained) -> Trained:
    """Its tensors leave the process that made them."""

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    return replace(
        trained,
        losses=[loss.cpu() for loss in trained.losses],
        updates=[update._replace(grad_norm=update.grad_norm.cpu()) for update in trained.updates],
        gradients=moved(trained.gradients),
        parameters=moved(trained.parameters),
        buffers=moved(trained.buffers),
    )


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize("option", OPTIONS)
def test_two_devices_train_like_one_process(
    option: str, problem: str, record_property: Callable[[str, object], None]
) -> None:
    """With targets that divide unequally."""
    task, choices = InDouble(PROBLEMS[problem]), list(TWENTY_STEPS.values())
    wanted = [train(task, knobs_of(**each), THREE) for each in choices]
    for found in on_cards(train_on_card, task, [{**each, "sharding": option} for each in choices]):
        for name, one, other in zip(TWENTY_STEPS, found, wanted, strict=True):
            assert max(errors(one, other).values()) < 1e-10, name
    record_property("configurations", len(choices))


@pytest.mark.skipif(NUM_DEVICES < 4 and not IS_EMULATED, reason="fewer than four CUDA devices")
def test_four_devices_train_like_one_process(record_property: Callable[[str, object], None]) -> None:
    """Two copies of two shards, too."""
    parts: Choices = {"optimizer": "sgd", "accum": "x2", "stepping": CLIPPED}
    task, choices = InDouble(PROBLEMS["transformer"]), [{**parts, "sharding": each} for each in COPIES.values()]
    wanted = train(task, knobs_of(**parts), THREE)
    for found in on_cards(train_on_card, task, choices, num_ranks=4):
        for name, one in zip(COPIES, found, strict=True):
            assert max(errors(one, wanted).values()) < 1e-10, name
    record_property("configurations", len(choices))


# What shares one model out, with the names of its meshes that are tried here.
SHARED_OUT: dict[str, tuple[Any, list[str]]] = {
    "layers": (test_sharding_tensor, ["a row of two", "two rows", "two rows that are sharded"]),
    "tokens": (test_sharding_context, ["a row of two", "runs of unequal length", "sharded over two rows"]),
    "layers and tokens": (test_sharding_sequence, ["a row of two", "two rows that share out states"]),
}


@pytest.mark.skipif(NUM_DEVICES < 4 and not IS_EMULATED, reason="fewer than four CUDA devices")
@pytest.mark.parametrize("what", SHARED_OUT)
def test_devices_that_share_a_model_out_train_like_one_process(
    what: str, record_property: Callable[[str, object], None]
) -> None:
    cases, meshes = SHARED_OUT[what]
    for name in meshes:
        problem, num_ranks, knob = cases.MESHES[name]
        choices: list[Choices] = [{**each, "sharding": knob} for each in cases.MANY]
        wanted = [train(InDouble(problem), knobs_of(**each), THREE) for each in cases.MANY]
        for found in on_cards(train_on_card, InDouble(problem), choices, num_ranks=num_ranks):
            for one, other in zip(found, wanted, strict=True):
                assert max(errors(one, other).values()) < 1e-10, name
    record_property("configurations", len(meshes) * len(cases.MANY))


@pytest.mark.skipif(NUM_DEVICES < 4 and not IS_EMULATED, reason="fewer than four CUDA devices")
@pytest.mark.parametrize(
    "name",
    [
        "two stages",
        "two stages, gpipe",
        "two stages each",
        "two stages each that hold back",
        "two rows that share out states",
        "two rows that are sharded",
        "two stages whose layers are split",
    ],
)
def test_devices_in_a_pipeline_train_like_one_process(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Messages between them wait in streams, as they do on a card."""
    problem, num_ranks, knob = PIPELINES[name]
    choices: list[Choices] = [{**each, "sharding": knob} for each in test_sharding_pipeline.MANY]
    wanted = [train(InDouble(problem), knobs_of(**each), THREE) for each in test_sharding_pipeline.MANY]
    ranks = on_cards(train_on_card, InDouble(problem), choices, num_ranks=num_ranks)
    for one, other in zip(zip(*ranks, strict=True), wanted, strict=True):
        assert max(errors(together([*one], knob.row_shape(num_ranks)), other).values()) < 1e-10
    record_property("configurations", len(choices))


def test_shared_parameters_end_where_whole_ones_do(record_property: Callable[[str, object], None]) -> None:
    """With the steppings that use gradients before all are there, or on the host."""
    task, sharded = InDouble(PROBLEMS["transformer"]), [{**ours, "sharding": "fsdp"} for ours, _ in CASES.values()]
    wanted = [train(task, knobs_of(**plain), THREE) for _, plain in CASES.values()]
    for found in on_cards(train_on_card, task, sharded):
        for name, one, other in zip(CASES, found, wanted, strict=True):
            torch.testing.assert_close(torch.stack(one.losses), torch.stack(other.losses), rtol=1e-10, atol=0)
            assert errors(one, other)["parameters"] <= 1e-10, name
    record_property("configurations", len(CASES))
