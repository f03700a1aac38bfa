"""ckpt: which blocks are computed again, that not a bit changes, and what is saved."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.knobs.ckpt import (
    RecomputeEvery,
)
from tests.laboratory import (
    CPU,
    FIVE_BLOCKS,
    PROBLEMS,
    knobs_of,
    make_batch,
    relative_error,
    saved_bytes,
    train,
)
from tests.tiers import first_of

pytestmark = pytest.mark.medium

NUM_STEPS = 20


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("problem", "precision"),
    first_of([(one, precision) for precision in ("bf16", "fp32") for one in ("transformer_dropout", "resnet")], 2),
)
@pytest.mark.parametrize("option", ["every1", "every2", "sqrt", "selective"])
def test_twenty_steps_are_the_same_to_the_last_bit(option: str, problem: str, precision: str) -> None:
    """Losses, parameters, BatchNorm's statistics; with dropout."""
    task = PROBLEMS[problem]
    found, wanted = (
        train(task, knobs_of(ckpt=ckpt, precision=precision), [4] * NUM_STEPS) for ckpt in (option, "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.parameters, wanted.parameters) == 0
    assert relative_error(found.buffers, wanted.buffers) == 0


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(
    ("every", "recomputed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (4, [0, 4]), (9, [0])]
)
def test_block_i_is_computed_again_when_i_divides(every: int, recomputed: list[int], problem: str) -> None:
    task, calls = FIVE_BLOCKS[problem], Counter[int]()
    rig = assemble(task, knobs_of(ckpt=RecomputeEvery(every)), CPU)
    for index, block in enumerate(task.structure(rig.model).blocks):
        inside = next(module for module in block.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        inside.register_forward_hook(lambda *_, index=index: calls.update([index]))
    step(rig, make_batch(task.spec, 2))
    assert [index for index in range(5) if calls[index] == 2] == recomputed
    assert set(calls.values()) <= {1, 2}


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_at_least_one(every: int) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.every={every}: must be at least 1"):
        RecomputeEvery(every)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_fewer_saved_tensors_the_more_blocks_are_computed_again(problem: str) -> None:
    task = FIVE_BLOCKS[problem]
    batch = make_batch(task.spec, 16)
    saved = [saved_bytes(task, knobs_of(ckpt=option), batch) for option in ("none", "every4", "every2", "every1")]
    assert saved == sorted(set(saved), reverse=True)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_activations_fall_by_two_fifths(problem: str) -> None:
    activations = {}
    for option in ("none", "every2", "every1"):
        task = FIVE_BLOCKS[problem]
        rig, batch = assemble(task, knobs_of(ckpt=option), CPU), make_batch(task.spec, 64)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations[option] = peak.by_kind_max[Kind.ACTIVATIONS]
    assert activations["none"] > activations["every2"] > activations["every1"]
    assert activations["every1"] <= 0.6 * activations["none"]
