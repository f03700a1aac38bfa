"""zeroth_order against autograd and a hand-written loop; what it keeps in memory, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Part, Rig
from lowvram.core.seeds import generator_for
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.optimizer import SGD, AdamW
from lowvram.knobs.stepping import InBackward, ZerothOrder
from tests.laboratory import (
    CPU,
    LARGER,
    MODELS,
    PROBLEMS,
    InDouble,
    batches,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
    train,
)
from tests.ranks import on_ranks

PLAIN = SGD(lr=0.1, momentum=0.0)


def rig_of(problem: str, double: bool = True, **choices: str | Knob) -> Rig:
    task = InDouble(PROBLEMS[problem]) if double else PROBLEMS[problem]
    return assemble(task, knobs_of(**{"stepping": "zeroth_order", "optimizer": PLAIN} | choices), CPU)


def batch_for(problem: str, double: bool = True, seed: int = 0) -> Part:
    return make_batch(PROBLEMS[problem].spec, 12, seed, torch.float64 if double else torch.float32)


def directions(parameters: Sequence[Tensor], step: int, seed: int = 0) -> list[Tensor]:
    """Those of one step, drawn whole."""
    return [
        torch.randn(parameter.shape, generator=generator_for(seed, f"{step}:{place}", CPU)).to(parameter.dtype)
        for place, parameter in enumerate(parameters)
    ]


# Against autograd, and a loop by hand


@pytest.mark.sampled
@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
@pytest.mark.parametrize("problem", ["transformer", "transformer_dropout", "resnet", "resnet_group"])
def test_the_projected_gradient_is_autograds_along_the_direction(problem: str, adapter: str) -> None:
    """With dropout too: both forward passes and autograd's drop the same."""
    rig, plain = (
        rig_of(problem, stepping=stepping, adapter=adapter) for stepping in (ZerothOrder(eps=1e-7), "after_backward")
    )
    batch = batch_for(problem)
    torch.manual_seed(5)
    update = step(rig, batch)[1]
    torch.manual_seed(5)
    (plain.criterion(plain.forward(batch), batch) / plain.total([batch])).backward()
    slope = sum(
        float((parameter.grad * direction).sum())
        for parameter, direction in zip(plain.trainable, directions(plain.trainable, 1), strict=True)
        if parameter.grad is not None
    )
    assert abs(slope) > 1e-3
    assert float(update.grad_norm) == pytest.approx(abs(slope), rel=1e-6)


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_three_steps_are_those_of_a_loop_by_hand(problem: str, parts: int, clip: float | None) -> None:
    eps, lr, decay = 1e-3, 0.05, 0.1
    optimizer = SGD(lr=lr, momentum=0.0, weight_decay=decay)
    ours = rig_of(problem, stepping=ZerothOrder(clip, eps, seed=7), optimizer=optimizer, accum=Parts(parts))
    theirs = rig_of(problem, stepping="after_backward")
    for index in (1, 2, 3):
        batch = batch_for(problem, seed=index)
        loss, update = step(ours, batch)
        plus, minus = by_hand(theirs, batch, directions(theirs.trainable, index, seed=7), eps, lr, decay, clip)
        assert float(loss) == pytest.approx((plus + minus) / 2, rel=1e-12)
        assert float(update.grad_norm) == pytest.approx(abs(plus - minus) / 2 / eps, rel=1e-9)
    assert relative_error(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters())) < 1e-12


@torch.no_grad()
def by_hand(
    rig: Rig, batch: Part, along: list[Tensor], eps: float, lr: float, decay: float, clip: float | None
) -> tuple[float, float]:
    """One step of MeZO with copies of the weights; returns the two losses."""
    before = [parameter.clone() for parameter in rig.trainable]
    losses = []
    for by in (eps, -eps):
        for parameter, weight, direction in zip(rig.trainable, before, along, strict=True):
            parameter.copy_(weight + by * direction)
        losses.append(float(rig.criterion(rig.forward(batch), batch) / rig.total([batch])))
    slope = (losses[0] - losses[1]) / (2 * eps)
    slope = slope if clip is None else slope * min(1.0, clip / (abs(slope) + 1e-6))  # as torch's clip_grad_norm_
    for parameter, weight, direction in zip(rig.trainable, before, along, strict=True):
        decayed = decay if parameter.ndim >= 2 else 0.0
        parameter.copy_(weight - lr * (slope * direction + decayed * weight))
    return losses[0], losses[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon", "adafactor"])
def test_any_optimizer_gets_the_estimate_as_its_gradient(optimizer: str) -> None:
    found = train(PROBLEMS["transformer"], knobs_of(stepping="zeroth_order", optimizer=optimizer), [8]).gradients
    rig = rig_of("transformer", double=False)
    along = dict(zip((name for name, _ in rig.model.named_parameters()), directions(rig.trainable, 1), strict=True))
    slope = float(found["norm.weight"][0, 0] / along["norm.weight"][0])
    assert relative_error({n: g[0] for n, g in found.items()}, {n: slope * along[n] for n in found}) < 1e-6


# What it leaves alone


@pytest.mark.parametrize("problem", MODELS)
def test_weights_come_back_up_to_rounding(problem: str) -> None:
    """Three additions of fp32 numbers: in a step each weight is off by at most three of its last digits."""
    rig = rig_of(problem, double=False)
    rig.stepper.set_lr(0.0)
    before = [parameter.detach().clone() for parameter in rig.trainable]
    largest = max(float(direction.abs().max()) for direction in directions(rig.trainable, 1))
    step(rig, batch_for(problem, double=False))
    for parameter, weight in zip(rig.trainable, before, strict=True):
        assert ((parameter - weight).abs() <= 3 * 2.0**-24 * 2 * (weight.abs() + 1e-3 * largest)).all()
    errors = [relative_error({"": p}, {"": w}) for p, w in zip(rig.trainable, before, strict=True) if w.any()]
    assert max(errors) < 2e-7


@pytest.mark.parametrize("parts", [1, 3])
def test_running_statistics_are_those_of_the_first_pass_alone(parts: int) -> None:
    rig, plain = rig_of("resnet", accum=Parts(parts)), rig_of("resnet", stepping="after_backward")
    batch = batch_for("resnet")
    step(rig, batch)
    with torch.no_grad():
        for parameter, direction in zip(plain.trainable, directions(plain.trainable, 1), strict=True):
            parameter.add_(direction, alpha=1e-3)
        for part in Parts(parts).split(batch):
            plain.forward(part)
    assert relative_error(dict(rig.model.named_buffers()), dict(plain.model.named_buffers())) == 0


def test_random_numbers_go_on_as_after_one_pass() -> None:
    rig, plain = (rig_of("transformer_dropout", stepping=each) for each in ("zeroth_order", "after_backward"))
    drawn = []
    for each in (rig, plain):
        torch.manual_seed(3)
        step(each, batch_for("transformer_dropout"))
        drawn.append(torch.rand(4))
    assert drawn[0].equal(drawn[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(bad: float) -> None:
    rig = rig_of("transformer")
    before = {name: parameter.clone() for name, parameter in rig.model.named_parameters()}
    update = step(
        replace(rig, criterion=lambda outputs, part: rig.criterion(outputs, part) * bad), batch_for("transformer")
    )[1]
    assert not update.applied
    assert relative_error(dict(rig.model.named_parameters()), before) < 1e-15
    assert step(rig, batch_for("transformer"))[1].applied


def test_state_goes_round() -> None:
    """A rig that was saved and loaded goes on as the one that wasn't, to the last digit."""
    rigs = [rig_of("transformer", double=False, optimizer=AdamW()) for _ in range(2)]
    for seed in range(2):
        step(rigs[0], batch_for("transformer", double=False, seed=seed))
    rigs[1].model.load_state_dict(rigs[0].model.state_dict())
    rigs[1].stepper.load_state_dict(deepcopy(rigs[0].stepper.state_dict()))
    losses = [step(each, batch_for("transformer", double=False, seed=2))[0] for each in rigs]
    assert losses[0].equal(losses[1])
    assert relative_error(rigs[1].model.state_dict(), rigs[0].model.state_dict()) == 0


# Memory


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("problem", MODELS)
def test_activations_are_those_of_inference_planned_and_measured(problem: str, precision: str) -> None:
    choices: dict[str, Any] = {"precision": precision, "optimizer": PLAIN}
    task, batch = LARGER[problem], make_batch(LARGER[problem].spec, 32)
    rig = assemble(task, knobs_of(stepping="zeroth_order", **choices), CPU)
    found = peak_of_step(rig, batch)
    with torch.no_grad(), ledger(rig.model, None, batch.tensors()) as inference:
        rig.criterion(rig.forward(batch), batch)
    activations = found[Kind.ACTIVATIONS]
    numbers_bytes = 2 * 512  # the first loss and the number of targets
    # What the first pass changes in buffers is put back after the second one.
    copies_bytes = sum(-(-buffer.nbytes // 512) * 512 for buffer in rig.model.buffers())
    assert activations <= inference.by_kind_max[Kind.ACTIVATIONS] + numbers_bytes
    largest_bytes = max(parameter.nbytes for parameter in rig.trainable) + 511
    assert found[Kind.GRADIENTS] <= largest_bytes
    assert found[Kind.OTHER] <= largest_bytes + copies_bytes
    assert found[Kind.OPTIMIZER] == 0
    assert found == peak_as_planned(task, knobs_of(stepping="zeroth_order", **choices), 32).by_kind_max
    recomputing = peak_of_step(assemble(task, knobs_of(ckpt="every1", **choices), CPU), batch)
    assert activations < 0.7 * recomputing[Kind.ACTIVATIONS]


def peak_of_step(rig: Rig, batch: Part) -> dict[Kind, int]:
    """The largest bytes of each kind, in the second step."""
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return dict(peak.by_kind_max)


def test_a_large_weight_is_moved_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is the same, and only one piece of the direction exists at a time."""
    rigs, found = [rig_of("transformer", double=False) for _ in range(2)], []
    for rig, elements in zip(rigs, (64, 2**22), strict=True):
        monkeypatch.setattr("lowvram.knobs.stepping.zeroth_order.PIECE_ELEMENTS", elements)
        found.append(peak_of_step(rig, batch_for("transformer", double=False)))
    assert found[0][Kind.OTHER] == 512 < found[1][Kind.OTHER]


# With other options


def test_ranks_go_along_the_same_direction_with_the_sum_of_their_losses() -> None:
    wanted = trained("none")
    for losses, parameters in on_ranks(trained, "ddp"):
        torch.testing.assert_close(losses, wanted[0], rtol=1e-12, atol=0)
        assert relative_error(parameters, wanted[1]) < 1e-12


def trained(sharding: str) -> tuple[Tensor, dict[str, Tensor]]:
    rig = rig_of("transformer", sharding=sharding, accum="x2")
    slices = [
        Parts(data_ranks().size).split(batch)[data_ranks().rank]
        for batch in batches(PROBLEMS["transformer"].spec, [16] * 3)
    ]
    losses = torch.stack([step(rig, batch)[0] for batch in slices])
    return losses, {name: parameter.detach() for name, parameter in rig.model.named_parameters()}


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"offload": "parameters"}, "the optimizer updates whole parameters, and offload=parameters ends that"),
        ({"precision": "bf16_pure"}, "weights that train are kept in fp32, and precision=bf16_pure ends that"),
    ],
)
def test_what_it_cannot_work_with_says_so(choices: dict[str, str], why: str) -> None:
    with pytest.raises(Incompatible, match=f"stepping=zeroth_order needs that {why}"):
        rig_of("transformer", double=False, **choices)


def test_without_plain_backward() -> None:
    """No backward pass runs: a gradient that a hook of autograd waits for never comes."""
    rig, seen = rig_of("transformer"), list[Tensor]()
    for parameter in rig.trainable:
        parameter.register_post_accumulate_grad_hook(seen.append)
    assert step(rig, batch_for("transformer"))[1].applied
    assert not seen
    assert Fact.PLAIN_BACKWARD in InBackward().needs() & ZerothOrder().breaks()


@pytest.mark.parametrize("eps", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_distance_is_above_zero(eps: float) -> None:
    with pytest.raises(BadInput, match=r"stepping\.eps=.*: must be above 0"):
        ZerothOrder(eps=eps)
