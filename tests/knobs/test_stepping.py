"""stepping: clipping, gradients that aren't finite, and the state between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD, AdamW
from lowvram.knobs.stepping import AfterBackward, AfterBackwardStepper, InBackward, Norm, SumsIn
from tests.laboratory import CPU, KNOBS, PROBLEMS, knobs_of, leaves_something_behind, make_batch, relative_error


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def make_stepper(model: nn.Module, clip: float | None = None) -> AfterBackwardStepper:
    parameters = list(model.parameters())
    return AfterBackwardStepper(parameters, SGD(momentum=0.9).make(parameters), clip)


def loss_of(model: nn.Module, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return model(x).square().sum() * scale


@pytest.mark.parametrize("divisor", [1.0, 64.0, torch.tensor(64.0, dtype=torch.float64)], ids=["1", "64", "tensor"])
@pytest.mark.parametrize("clip", [None, 0.3, 1e9])
def test_clipping_is_torchs(clip: float | None, divisor: float | Tensor) -> None:
    """The parameters after three steps, and the norm before clipping, also of gradients that arrive too large."""
    ours, theirs = make_model(), make_model()
    stepper = make_stepper(ours, clip)
    optimizer = SGD(momentum=0.9).make(list(theirs.parameters()))
    for seed in range(3):
        stepper.begin(1, divisor)
        stepper.backward(loss_of(ours, seed, float(divisor)))
        update = stepper.update()
        loss_of(theirs, seed).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(update.grad_norm, norm, rtol=1e-12, atol=0)
    assert relative_error(dict(ours.named_parameters()), dict(theirs.named_parameters())) < 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, clip: float | None, steps_before: int) -> None:
    model = make_model()
    stepper = make_stepper(model, clip)
    for seed in range(steps_before):
        stepper.begin(1)
        stepper.backward(loss_of(model, seed))
        assert stepper.update().applied
    before = [*values(model.state_dict()), *values(stepper.state_dict())]
    stepper.begin(1)
    stepper.backward(loss_of(model))
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad[0, 0] = bad
    update = stepper.update()
    assert not update.applied
    assert not update.grad_norm.isfinite()
    assert [*values(model.state_dict()), *values(stepper.state_dict())] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def values(state: Any) -> list[Any]:
    """All numbers of a state, as plain values."""
    leaves = tree_leaves(state)
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def test_gradients_of_all_parts_are_used_and_then_freed() -> None:
    model, whole = make_model(), make_model()
    for one, losses in (
        (model, [loss_of(model, 1), loss_of(model, 2)]),
        (whole, [loss_of(whole, 1) + loss_of(whole, 2)]),
    ):
        stepper = make_stepper(one)
        stepper.begin(len(losses))
        for loss in losses:
            stepper.backward(loss)
        stepper.update()
    assert relative_error(dict(model.named_parameters()), dict(whole.named_parameters())) < 1e-12
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model = make_model()
    first, last = model[0], model[2]
    before = [parameter.clone() for parameter in last.parameters()]
    stepper = make_stepper(model)
    stepper.begin(1)
    stepper.backward(first(torch.ones(1, 5, dtype=torch.float64)).sum())
    assert stepper.update().applied
    assert all(torch.equal(one, other) for one, other in zip(last.parameters(), before, strict=True))


def test_the_learning_rate_is_that_of_the_next_update() -> None:
    model = make_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    stepper = make_stepper(model)
    for lr, moves in ((0.0, False), (0.1, True)):
        stepper.set_lr(lr)
        stepper.begin(1)
        stepper.backward(loss_of(model))
        stepper.update()
        assert (relative_error(dict(model.named_parameters()), before) > 0) == moves


def test_state_goes_round() -> None:
    """A stepper that was saved and loaded goes on as the one that wasn't."""
    models, steppers = [make_model(), make_model()], []
    for model in models:
        steppers.append(AfterBackwardStepper(list(model.parameters()), AdamW().make(list(model.parameters())), 1.0))
        take_step(steppers[-1], model)
    fresh = AfterBackwardStepper(list(models[1].parameters()), AdamW().make(list(models[1].parameters())), 1.0)
    fresh.load_state_dict(steppers[1].state_dict())
    take_step(steppers[0], models[0])
    take_step(fresh, models[1])
    assert relative_error(models[1].state_dict(), models[0].state_dict()) == 0


def take_step(stepper: AfterBackwardStepper, model: nn.Module) -> None:
    stepper.begin(1)
    stepper.backward(loss_of(model))
    stepper.update()


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_norm_is_above_zero(clip: float) -> None:
    with pytest.raises(BadInput, match=rf"stepping\.clip={clip}: must be null \(off\) or a norm above 0"):
        AfterBackward(clip)


# What goes wrong without the fact that in_backward and cpu_offload take away.


@dataclass(frozen=True)
class Reader(Knob):
    """Looks at the gradients when the update begins, as a gradient filter would."""

    seen: list[int] = field(default_factory=list)  # gradients of each step
    needed: frozenset[Fact] = frozenset()

    stage = Stage.NUMERICS

    def needs(self) -> frozenset[Fact]:
        return self.needed

    def apply(self, rig: Rig) -> Rig:
        update = rig.stepper.update

        def look_and_update() -> Any:
            self.seen.append(sum(parameter.grad is not None for parameter in rig.trainable))
            return update()

        rig.stepper.update = look_and_update
        return rig


def test_without_grads_at_update() -> None:
    """Who reads gradients at the update finds all of them, or none; so it is refused where it says what it needs."""
    task, seen = PROBLEMS["transformer"], {}
    for option in ("after_backward", "in_backward", "cpu_offload"):
        reader = Reader()
        rig = assemble(task, knobs_of(stepping=option) | {"reader": reader}, CPU)
        step(rig, make_batch(task.spec, 4))
        seen[option] = reader.seen
    assert seen == {
        "after_backward": [len(list(task.make_model().parameters()))],
        "in_backward": [0],
        "cpu_offload": [0],
    }
    for option in ("in_backward", "cpu_offload"):
        assert KNOBS["stepping", option].breaks() - {Fact.UNDOABLE_STEPS} == {Fact.GRADS_AT_UPDATE}
        needy = Reader(needed=frozenset({Fact.GRADS_AT_UPDATE}))
        with pytest.raises(
            Incompatible, match=f"reader needs that every gradient is alive .*, and stepping={option} ends"
        ):
            assemble(task, knobs_of(stepping=option) | {"reader": needy}, CPU)


def test_without_undoable_steps() -> None:
    """Weights are updated before all gradients are known, or moved there and back."""
    assert leaves_something_behind(stepping="in_backward")
    assert leaves_something_behind(stepping=InBackward(clip=1.0, norm=Norm.last_step))
    assert leaves_something_behind(stepping=InBackward(clip=1.0, sums=SumsIn.bf16), accum="x2")
    assert leaves_something_behind(stepping="zeroth_order")
    for whole in (InBackward(clip=1.0), InBackward(clip=1.0, norm=Norm.two_passes), "cpu_offload"):
        assert not leaves_something_behind(stepping=whole)
