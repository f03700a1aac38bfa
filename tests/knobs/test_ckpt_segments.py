"""ckpt=sqrt: what is kept and computed again in segments of blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.knobs.ckpt import (
    RecomputeSegments,
)
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    FIVE_BLOCKS,
    PROBLEMS,
    TOKENS,
    knobs_of,
    make_batch,
    relative_error,
    train,
)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(("segment", "num_calls"), [(None, [3, 2, 3, 2, 2]), (3, [3, 3, 2, 3, 2]), (1, [2] * 5)])
def test_all_but_the_last_block_of_a_segment_run_three_times(
    segment: int | None, num_calls: list[int], problem: str
) -> None:
    """Of five blocks the square root is two."""
    task, calls = FIVE_BLOCKS[problem], Counter[int]()
    rig = assemble(task, knobs_of(ckpt=RecomputeSegments(segment)), CPU)
    for index, block in enumerate(task.structure(rig.model).blocks):
        inside = next(module for module in block.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        inside.register_forward_hook(lambda *_, index=index: calls.update([index]))
    for _ in range(2):
        calls.clear()
        step(rig, make_batch(task.spec, 2))
        assert [calls[index] for index in range(5)] == num_calls


SIXTEEN_BLOCKS = Auto().pose(TransformerConfig(num_layers=16, width=32, num_heads=1, context=8), TOKENS)


def test_of_sixteen_blocks_seven_boundaries_are_alive_at_most() -> None:
    """The first inputs of four segments, and three more inside the last one; with every1 all sixteen."""
    activations, batch = {}, make_batch(TOKENS, 16)
    for option in ("every1", "sqrt"):
        rig = assemble(SIXTEEN_BLOCKS, knobs_of(ckpt=option), CPU)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations[option] = peak.by_kind_max[Kind.ACTIVATIONS]
    assert activations["every1"] - activations["sqrt"] == 9 * (16 * 8 * 32 * 4)


def test_segments_follow_each_part_of_a_batch() -> None:
    found, wanted = (
        train(PROBLEMS["transformer_dropout"], knobs_of(ckpt=ckpt, accum="x4"), [8, 7])
        for ckpt in (RecomputeSegments(3), "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0


@pytest.mark.parametrize("segment", [0, -2])
def test_a_segment_has_at_least_one_block(segment: int) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.segment={segment}: must be null .* or at least 1"):
        RecomputeSegments(segment)


@pytest.mark.parametrize("ends", [{"compile": "blocks"}, {"offload": "parameters"}], ids=str)
def test_what_segments_cant_be_had_with_is_refused(ends: dict[str, str]) -> None:
    ((group, option),) = ends.items()
    with pytest.raises(Incompatible, match=rf"ckpt=sqrt needs that .*, and {group}={option} ends that"):
        assemble(PROBLEMS["transformer"], knobs_of(ckpt="sqrt", **ends), CPU)
