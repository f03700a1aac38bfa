"""ckpt=auto: the chosen blocks are computed again. How they are chosen: tests/planning/test_choice.py."""

from __future__ import annotations

import pytest

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.knobs.ckpt import (
    RecomputeChosen,
    RecomputeEvery,
)
from tests.laboratory import (
    CPU,
    FIVE_BLOCKS,
    knobs_of,
)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(("blocks", "treated"), [(None, [0, 1, 2, 3, 4]), ([], []), ([3, 0], [0, 3])])
def test_these_blocks_are_recomputed(blocks: list[int] | None, treated: list[int], problem: str) -> None:
    task = FIVE_BLOCKS[problem]
    model = assemble(task, knobs_of(ckpt=RecomputeChosen(blocks)), CPU).model
    assert [index for index, block in enumerate(task.structure(model).blocks) if "forward" in vars(block)] == treated


def test_a_plan_chooses_only_what_was_not_typed() -> None:
    assert RecomputeChosen().left_to_plan() == "blocks"
    assert RecomputeChosen([1]).left_to_plan() is None
    assert RecomputeEvery().left_to_plan() is None


def test_every_block_is_no_advice_to_who_leaves_the_choice_to_a_plan() -> None:
    assert RecomputeEvery().improves_on(RecomputeEvery(2))
    assert not RecomputeEvery().improves_on(RecomputeChosen([0]))


@pytest.mark.parametrize("blocks", [[0, 0], [-1]])
def test_blocks_are_different_numbers(blocks: list[int]) -> None:
    with pytest.raises(BadInput, match=r"ckpt\.blocks=.*: must be null \(a plan chooses\) or a list of different"):
        RecomputeChosen(blocks)


def test_blocks_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"ckpt\.blocks=\[1, 5\]: must be numbers from 0 to 4, as this model has 5 blocks"
    ):
        assemble(FIVE_BLOCKS["resnet"], knobs_of(ckpt=RecomputeChosen([1, 5])), CPU)
