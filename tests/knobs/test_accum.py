"""accum: the parts of a batch, and that splitting it changes memory but not the science."""

from __future__ import annotations

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.knobs.accum import Growing, Parts, Whole
from lowvram.knobs.stepping import AfterBackward
from tests.laboratory import CPU, PROBLEMS, InDouble, knobs_of, make_batch, relative_error, train

NUM_STEPS = 20


def sizes_of(batch: Part, parts: int) -> list[int]:
    return [part.num_samples for part in Parts(parts).split(batch)]


def test_parts_are_as_equal_as_can_be_and_none_is_empty() -> None:
    batch = make_batch(PROBLEMS["transformer"].spec, 10)
    assert sizes_of(batch, 1) == [10]
    assert sizes_of(batch, 5) == [2] * 5
    assert sizes_of(batch, 4) == [3, 3, 2, 2]
    assert sizes_of(batch, 32) == [1] * 10


def test_parts_hold_every_sample_in_order_without_a_copy() -> None:
    inputs = {"a": torch.arange(12).reshape(6, 2), "b": [torch.arange(6)]}
    parts = Parts(4).split(Part(inputs, torch.arange(6)))
    assert torch.equal(torch.cat([part.inputs["a"] for part in parts]), inputs["a"])
    assert torch.equal(torch.cat([part.inputs["b"][0] for part in parts]), inputs["b"][0])
    assert torch.equal(torch.cat([part.targets for part in parts]), torch.arange(6))
    storages = {part.inputs["a"].untyped_storage().data_ptr() for part in parts}
    assert storages == {inputs["a"].untyped_storage().data_ptr()}


@pytest.mark.parametrize("parts", [0, -1])
def test_no_parts_are_refused(parts: int) -> None:
    with pytest.raises(BadInput, match=f"accum.parts={parts}: must be at least 1"):
        Parts(parts)


def test_none_has_one_part() -> None:
    with pytest.raises(BadInput, match=r"accum\.parts=2: must be 1 with accum=none: choose accum=x2"):
        Whole(2)


@pytest.mark.parametrize(
    ("num_samples", "numbers"),
    [(32, [1, 2, 4, 8, 16, 32]), (24, [1, 2, 4, 8, 24]), (30, [1, 2, 5, 10, 30]), (7, [1, 7]), (1, [1])],
)
def test_a_growing_number_of_parts_divides_and_at_least_doubles(num_samples: int, numbers: list[int]) -> None:
    """Until each part is down to one sample."""
    found: list[int] = []
    following: int | None = 1
    while following is not None:
        found.append(following)
        following = Growing(following).more_parts(num_samples)
    assert found == numbers


def test_a_number_that_was_chosen_stays() -> None:
    assert Parts(2).more_parts(32) is None
    assert Whole().more_parts(32) is None


def test_batch_norm_is_reported() -> None:
    sentence = Parts(4).caveat(PROBLEMS["resnet"].make_model())
    assert sentence is not None
    assert "each of the 4 parts" in sentence
    assert Parts(1).caveat(PROBLEMS["resnet"].make_model()) is None
    assert Parts(4).caveat(PROBLEMS["resnet_group"].make_model()) is None
    assert Parts(4).caveat(PROBLEMS["transformer"].make_model()) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_four_parts_have_the_loss_history_of_the_whole_batch(problem: str, optimizer: str) -> None:
    histories = [
        torch.stack(
            train(PROBLEMS[problem], knobs_of(accum=accum, optimizer=optimizer), [8] * NUM_STEPS, lr=1e-3).losses
        )
        for accum in ("none", "x4")
    ]
    torch.testing.assert_close(*histories, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_twenty_steps_have_the_same_parameters_in_fp64(clip: float | None) -> None:
    """Clipping sees the whole gradient, once."""
    problem = InDouble(PROBLEMS["transformer"])
    whole, parts = (
        train(problem, knobs_of(accum=accum, stepping=AfterBackward(clip)), [8] * NUM_STEPS) for accum in ("none", "x4")
    )
    assert relative_error(parts.parameters, whole.parameters) < 1e-10


def test_activations_shrink_with_the_parts() -> None:
    problem = PROBLEMS["transformer"]
    activations = []
    for accum in ("none", "x2", "x4", "x32"):
        rig, batch = assemble(problem, knobs_of(accum=accum), CPU), make_batch(problem.spec, 32)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations.append(peak.by_kind_max[Kind.ACTIVATIONS])
    assert activations == sorted(set(activations), reverse=True)
    assert activations[1] < 0.6 * activations[0]
