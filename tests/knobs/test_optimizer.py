"""optimizer: the choice of update, its groups of parameters and its ranges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.core.stepper import Stepper
from lowvram.knobs.optimizer import (
    SGD,
    Adafactor,
    AdamMini,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    Apollo,
    ApolloMini,
    GaLore,
    Moments,
    Muon,
    SinkGD,
    decayed,
)
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward
from lowvram.tasks import Auto
from tests.laboratory import CPU, OPTIONS, TOKENS, TRANSFORMER, batches, knobs_of, make_batch

pytestmark = pytest.mark.medium


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4,), (2, 3, 1, 1), ())]


def test_weights_decay_and_biases_do_not() -> None:
    weights = parameters()
    decay, keep = decayed(weights, 0.1)
    assert [id(p) for p in decay["params"]] == [id(weights[0]), id(weights[2])]
    assert [id(p) for p in keep["params"]] == [id(weights[1]), id(weights[3])]
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    assert len(decayed(weights[1:2], 0.1)) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AdamW(0.01, 0.8, 0.9, 1e-6, 0.2), lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.2)),
        (SGD(0.1, 0.0, False, 0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (SGD(0.1, 0.9, True, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01)),
        (Adafactor(0.02, -0.7, 1.5, 0.2), lambda p: torch.optim.Adafactor(p, 0.02, -0.7, d=1.5, weight_decay=0.2)),
        (AdamW8bit(0.01, 0.8, 0.9, 1e-6, 0.2), lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.2)),
        (AdamW4bit(0.01, 0.8, 0.9, 1e-6, 0.2), lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.2)),
    ],
    ids=["adamw", "sgd", "nesterov", "adafactor", "8bit", "4bit"],
)
def test_every_field_reaches_the_optimizer(ours: Any, theirs: Any) -> None:
    """Three updates of a weight (too small for states of few bits) are those of torch's plain implementation."""
    results = []
    for make in (ours.make, theirs):
        weight = parameters()[0]
        optimizer = make([weight])
        for number in range(3):
            weight.grad = torch.full_like(weight, 0.5 + number)
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdamW(lr=0.0), r"optimizer\.lr=0\.0: must be above 0"),
        (lambda: AdamW(lr=math.nan), r"optimizer\.lr=nan"),
        (lambda: AdamW(weight_decay=-1.0), r"optimizer\.weight_decay=-1\.0: must be at least 0"),
        (lambda: AdamW(beta1=1.0), r"optimizer\.beta1=1\.0: must be at least 0 and below 1"),
        (lambda: AdamW(beta2=-0.1), r"optimizer\.beta2=-0\.1"),
        (lambda: AdamW(eps=0.0), r"optimizer\.eps=0\.0: must be above 0"),
        (lambda: SGD(lr=-1.0), r"optimizer\.lr=-1\.0"),
        (lambda: SGD(weight_decay=math.nan), r"optimizer\.weight_decay=nan"),
        (lambda: SGD(momentum=1.0), r"optimizer\.momentum=1\.0"),
        (lambda: SGD(momentum=0.0, nesterov=True), r"optimizer\.nesterov=true: must be false without momentum"),
        (lambda: Adafactor(lr=0.0), r"optimizer\.lr=0\.0"),
        (lambda: Adafactor(beta2_decay=0.1), r"optimizer\.beta2_decay=0\.1: must be at most 0"),
        (lambda: Adafactor(max_update=0.5), r"optimizer\.max_update=0\.5: must be at least 1"),
        (lambda: AdamW8bit(lr=-1.0), r"optimizer\.lr=-1\.0"),
        (lambda: AdamW4bit(beta2=1.0), r"optimizer\.beta2=1\.0"),
        (lambda: Muon(momentum=1.0), r"optimizer\.momentum=1\.0"),
        (lambda: Muon(iterations=0), r"optimizer\.iterations=0: must be at least 1 and below 100"),
        (lambda: Muon(eps=math.nan), r"optimizer\.eps=nan"),
        (lambda: Apollo(rank_share=0.0), r"optimizer\.rank_share=0\.0: must be above 0 and at most 1"),
        (lambda: Apollo(max_growth=1.0), r"optimizer\.max_growth=1\.0: must be above 1"),
        (lambda: ApolloMini(redraw_every=0), r"optimizer\.redraw_every=0: must be at least 1 step"),
        (lambda: ApolloMini(scale=0.0), r"optimizer\.scale=0\.0: must be above 0"),
        (lambda: GaLore(rank_share=1.5), r"optimizer\.rank_share=1\.5"),
        (lambda: GaLore(refresh_every=0), r"optimizer\.refresh_every=0"),
        (lambda: GaLore(scale=math.nan), r"optimizer\.scale=nan"),
        (lambda: SinkGD(iterations=0), r"optimizer\.iterations=0: must be at least 1 and below 100"),
        (lambda: SinkGD(scale=-1.0), r"optimizer\.scale=-1\.0"),
        (lambda: AdamMini(beta2=1.0), r"optimizer\.beta2=1\.0"),
    ],
    ids=range(28),
)
def test_values_out_of_range_are_named(make: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make()


# What all of them have in common


WIDE = Auto().pose(replace(TRANSFORMER, num_layers=1, width=64), TOKENS)  # with tensors large enough for few bits


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("option", OPTIONS["optimizer"])
def test_a_saved_state_goes_on_to_the_bit(option: str, precision: str, tmp_path: Path) -> None:
    """Through a file as a snapshot's, read without running its code; also when other random numbers are drawn."""
    goes_on_to_the_bit(knobs_of(optimizer=option, precision=precision), tmp_path)


def test_a_state_with_bf16_moments_goes_on_to_the_bit(tmp_path: Path) -> None:
    goes_on_to_the_bit(knobs_of(optimizer=AdamW(moments=Moments.bf16)), tmp_path)


@pytest.mark.parametrize("knob", [Apollo(redraw_every=3), GaLore(refresh_every=3)], ids=["apollo", "galore"])
def test_projections_change_on_the_same_step_after_a_resume(knob: Knob, tmp_path: Path) -> None:
    """The fourth step has new ones, two steps after the state was saved."""
    goes_on_to_the_bit(knobs_of(optimizer=knob), tmp_path)


def goes_on_to_the_bit(knobs: dict[str, Knob], folder: Path) -> None:
    first, second = (assemble(WIDE, knobs, CPU) for _ in range(2))
    before, after = list(batches(WIDE.spec, [4, 4])), list(batches(WIDE.spec, [6, 6]))
    for batch in before:
        step(first, batch)
    torch.save({"model": first.model.state_dict(), "stepper": first.stepper.state_dict()}, folder / "saved.pt")
    saved = torch.load(folder / "saved.pt", map_location="cpu", weights_only=True)
    second.model.load_state_dict(saved["model"])
    second.stepper.load_state_dict(saved["stepper"])
    for rig, seed in ((first, 1), (second, 2)):
        torch.manual_seed(seed)
        rig.stepper.set_lr(0.02)
        for batch in after:
            assert step(rig, batch)[1].applied
    found, wanted = ([*rig.model.state_dict().values(), *states(rig.stepper)] for rig in (second, first))
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, wanted, strict=True))


def states(stepper: Stepper) -> list[Tensor]:
    """All numbers of a state, those inside states of few bits too."""
    return [plain for leaf in tree_leaves(stepper.state_dict()) if isinstance(leaf, Tensor) for plain in insides(leaf)]


def insides(tensor: Tensor) -> list[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("option", OPTIONS["optimizer"])
def test_one_optimizer_per_parameter_does_what_one_for_all_does(option: str) -> None:
    """As when each gradient is used as it is born."""
    rigs = [assemble(WIDE, knobs_of(optimizer=option), CPU) for _ in range(2)]
    together = [rigs[0].make_optimizer(rigs[0].trainable)]
    alone = [rigs[1].make_optimizer([parameter]) for parameter in rigs[1].trainable]
    for rig, optimizers in zip(rigs, (together, alone), strict=True):
        for seed in range(3):
            for number, parameter in enumerate(rig.trainable):
                draw = torch.Generator().manual_seed(100 * seed + number)
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            for optimizer in optimizers:
                optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(rigs[0].trainable, rigs[1].trainable, strict=True))


@pytest.mark.parametrize("option", OPTIONS["optimizer"])
def test_a_learning_rate_of_zero_changes_nothing(option: str) -> None:
    """The schedule's word reaches every group of every optimizer."""
    rig = assemble(WIDE, knobs_of(optimizer=option), CPU)
    before = [parameter.clone() for parameter in rig.trainable]
    for lr, changes in ((0.0, False), (0.01, True)):
        rig.stepper.set_lr(lr)
        for batch in batches(WIDE.spec, [4, 4]):
            step(rig, batch)
        assert all((not torch.equal(*two)) is changes for two in zip(before, rig.trainable, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", OPTIONS["optimizer"])
def test_every_optimizer_clips_skips_and_learns(option: str) -> None:
    """With parts, a loss scale that is too large at first, and clipping: it fits one batch better and better."""
    knobs = knobs_of(optimizer=option, precision=Fp16(init_scale=2.0**31), accum="x4", stepping=AfterBackward(clip=1.0))
    rig, batch = assemble(WIDE, knobs, CPU), make_batch(WIDE.spec, 8)
    steps = [step(rig, batch) for _ in range(40)]
    applied = [float(loss) for loss, update in steps if update.applied]
    assert len(applied) < 40
    assert applied[-1] < 0.9 * applied[0]


@pytest.mark.parametrize("option", OPTIONS["optimizer"])
def test_steps_that_rounding_to_the_nearest_would_lose_reach_weights_of_16_bits(option: str) -> None:
    """Each lands its updates as the rig says (`with_fp32_compute` does it): of many weights a few move, by chance."""
    rig = assemble(WIDE, knobs_of(optimizer=option, precision="bf16_pure"), CPU)
    optimizer = rig.make_optimizer(rig.trainable)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4  # below 1, numbers of bf16 lie 39 times as far apart
    for number, weight in enumerate(rig.trainable):
        weight.detach().fill_(1.0)
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(weight.dtype)
    optimizer.step()
    moved = torch.cat([weight.detach().flatten() != 1 for weight in rig.trainable]).float().mean()
    assert 0 < moved < 0.1
