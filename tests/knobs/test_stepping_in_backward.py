"""stepping=in_backward: how few gradients are alive, where the norm comes from, and what a bad gradient leaves."""

from __future__ import annotations

import io
import math
import weakref
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD, AdamW
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, InBackward, InBackwardStepper, Norm, SumsIn, in_backward
from lowvram.knobs.stepping.host_sums import HostSums
from lowvram.knobs.stepping.in_backward import SMALL_NUMEL
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    RESNET,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
    train,
)

WIDE = {
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=4, width=64), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16, layers=[2, 2]), IMAGES),
}
PLAIN_SGD = SGD(momentum=0.9).make
NORMS = pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.name)


def measured(rig: Rig, problem: str) -> Peak:
    """The ledger of the second step."""
    batch = make_batch(WIDE[problem].spec, 16)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


@pytest.mark.sampled
@pytest.mark.parametrize("problem", WIDE)
@pytest.mark.parametrize("clip", [None, 0.1])
@NORMS
def test_with_one_part_hardly_more_than_one_gradient_is_alive(problem: str, clip: float | None, norm: Norm) -> None:
    rig = assemble(WIDE[problem], knobs_of(stepping=InBackward(clip, norm)), CPU)
    sizes = [parameter.nbytes for parameter in rig.trainable]
    peak = measured(rig, problem)
    assert max(sizes) <= peak.by_kind_max[Kind.GRADIENTS] <= max(sizes) + 0.05 * sum(sizes)
    waits_on_host = clip is not None and norm is Norm.host
    assert (peak.by_kind_max[Kind.HOST] >= sum(sizes)) == waits_on_host


@pytest.mark.parametrize("norm", [Norm.host, Norm.two_passes], ids=["host", "two_passes"])
def test_on_paper_it_is_the_same(norm: Norm) -> None:
    knobs = knobs_of(stepping=InBackward(0.1, norm))
    found = measured(assemble(WIDE["resnet"], knobs, CPU), "resnet")
    assert peak_as_planned(WIDE["resnet"], knobs, 16).by_kind_max == found.by_kind_max


@pytest.mark.parametrize("problem", WIDE)
def test_parts_are_summed_on_the_host(problem: str) -> None:
    rig = assemble(WIDE[problem], knobs_of(stepping="in_backward", accum="x4"), CPU)
    sizes = [parameter.nbytes for parameter in rig.trainable]
    peak = measured(rig, problem)
    assert peak.by_kind_max[Kind.GRADIENTS] <= max(sizes) + 0.05 * sum(sizes)
    assert peak.by_kind_max[Kind.HOST] >= sum(sizes)
    before = replace(host.traffic)
    step(rig, make_batch(WIDE[problem].spec, 16))
    assert host.traffic.to_host_bytes - before.to_host_bytes == 4 * sum(sizes)
    assert host.traffic.to_device_bytes - before.to_device_bytes == sum(sizes)


# On a small model of its own


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def make_stepper(
    model: nn.Module, clip: float | None = None, norm: Norm = Norm.host, make: MakeOptimizer = PLAIN_SGD
) -> InBackwardStepper:
    parameters = list(model.parameters())
    return InBackwardStepper(parameters, make, SumsIn.host.room_for(parameters), clip, norm)


def loss_of(model: nn.Module, seed: int = 0, scale: float = 1.0) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x).square().sum() * scale


def take_step(stepper: InBackwardStepper, model: nn.Module, *losses: Tensor, divisor: Tensor | float = 1.0) -> Any:
    stepper.begin(len(losses), divisor)
    for loss in losses:
        stepper.backward(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    return stepper.update()


@NORMS
@pytest.mark.parametrize("divisor", [1.0, 64.0, torch.tensor(64.0), torch.tensor(1.0)], ids=["1", "64", "t64", "t1"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_norm_is_that_of_all_gradients_before_clipping(norm: Norm, divisor: Tensor | float, num_parts: int) -> None:
    for clip in (None, 0.3):
        model, plain = make_model(), make_model()
        stepper = make_stepper(model, clip, norm)
        losses = [loss_of(model, seed, float(divisor)) for seed in range(num_parts)]
        update = take_step(stepper, model, *losses, divisor=divisor)
        for seed in range(num_parts):
            loss_of(plain, seed).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), math.inf)
        torch.testing.assert_close(update.grad_norm, wanted, rtol=1e-12, atol=0)


@NORMS
@pytest.mark.parametrize("divisor", [torch.tensor(64.0), torch.tensor(1.0)], ids=["64", "1"])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_with_a_loss_scale_a_bad_gradient_changes_nothing(
    norm: Norm, divisor: Tensor, clip: float | None, num_parts: int
) -> None:
    """Also where the scale happens to be 1."""
    model = make_model(torch.float32)
    stepper = make_stepper(model, clip, norm)
    take_step(stepper, model, loss_of(model), divisor=divisor)
    before = [parameter.clone() for parameter in model.parameters()]
    losses = [*(loss_of(model, seed) for seed in range(num_parts - 1)), loss_of(model, 9, 1e38)]
    update = take_step(stepper, model, *losses, divisor=divisor)
    assert not update.applied
    assert not update.grad_norm.isfinite()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert take_step(stepper, model, loss_of(model), divisor=divisor).applied
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("clip", "norm"), [(0.3, Norm.host), (0.3, Norm.two_passes)])
def test_with_clipping_a_bad_gradient_changes_nothing(clip: float, norm: Norm) -> None:
    model = make_model(torch.float32)
    stepper = make_stepper(model, clip, norm)
    before = [parameter.clone() for parameter in model.parameters()]
    assert not take_step(stepper, model, loss_of(model, scale=1e38)).applied
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_used_at_once_a_bad_gradient_is_reported_when_parameters_have_changed() -> None:
    """The limit of using gradients as they are born, without anything that asks for the norm first."""
    model = make_model(torch.float32)
    stepper = make_stepper(model)
    before = [parameter.clone() for parameter in model.parameters()]
    update = take_step(stepper, model, loss_of(model, scale=1e38))
    assert not update.applied
    assert not any(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_a_skipped_second_pass_lets_the_graph_go() -> None:
    model = make_model(torch.float32)
    stepper = make_stepper(model, 0.3, Norm.two_passes)
    loss = loss_of(model, scale=1e38)
    graph = weakref.ref(loss)
    take_step(stepper, model, loss)
    assert graph() is loss
    del loss
    assert graph() is None


def test_the_last_steps_norm_clips_the_next_one() -> None:
    """The first step, which has none before it, by its own."""
    clip, model, plain = 0.3, make_model(), make_model()
    stepper = make_stepper(model, clip, Norm.last_step)
    optimizer = SGD(momentum=0.9).make(list(plain.parameters()))
    norms: list[Tensor] = []
    for seed in range(4):
        take_step(stepper, model, loss_of(model, seed, scale=1.0 + seed))
        loss_of(plain, seed, scale=1.0 + seed).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), math.inf))
        by = min(1.0, clip / (float(norms[max(0, seed - 1)]) + 1e-6))
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(by)
        optimizer.step()
        optimizer.zero_grad()
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) < 1e-12
    assert max(norms) > 1.5 * min(norms)


def test_only_clipping_by_the_last_step_changes_what_is_trained() -> None:
    model = make_model()
    caveats = [InBackward(clip, norm).caveat(model) for clip in (None, 0.3) for norm in Norm]
    assert caveats[:-1] == [None] * 5
    assert "norm of the step before it" in str(caveats[-1])


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_by_the_last_step_parts_and_loss_scales_are_exact_all_the_same(problem: str) -> None:
    for choices in ({"accum": "x4"}, {"precision": Fp16(2.0**12)}):
        found, wanted = (
            train(PROBLEMS[problem], knobs_of(optimizer="sgd", stepping=knob, **choices), [8] * 6, lr=0.01)
            for knob in (InBackward(0.3, Norm.last_step), AfterBackward(0.3))
        )
        assert relative_error(found.parameters, wanted.parameters) <= 1e-6


@pytest.mark.parametrize(("clip", "norm"), [(None, Norm.host), (0.3, Norm.last_step)])
def test_state_goes_round_through_a_file(clip: float | None, norm: Norm) -> None:
    models = [make_model(), make_model()]
    steppers = [make_stepper(model, clip, norm, AdamW().make) for model in models]
    for stepper, model in zip(steppers, models, strict=True):
        take_step(stepper, model, loss_of(model, 1))
    file = io.BytesIO()
    torch.save(steppers[1].state_dict(), file)
    file.seek(0)
    third = make_model()
    third.load_state_dict(models[1].state_dict())
    fresh = make_stepper(third, clip, norm, AdamW().make)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    take_step(steppers[0], models[0], loss_of(models[0], 2))
    take_step(fresh, third, loss_of(third, 2))
    assert relative_error(third.state_dict(), models[0].state_dict()) == 0


def test_small_vectors_share_an_optimizer() -> None:
    model = make_model()
    model.register_parameter("large", nn.Parameter(torch.zeros(SMALL_NUMEL + 1)))
    model.register_parameter("number", nn.Parameter(torch.zeros(())))
    stepper = make_stepper(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[vector] for vector in stepper.vectors} == {"0.bias", "2.bias", "number"}
    assert len({stepper.optimizers[vector] for vector in stepper.vectors}) == 1
    assert len(stepper.each()) == len(stepper.state_dict()["optimizers"]) == 4  # two matrices, the large vector


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_it_updates_them_once_a_step(clip: float | None, num_parts: int) -> None:
    model, updates = make_model(), []
    stepper = make_stepper(model, clip)
    stepper.optimizers[stepper.vectors[0]].register_step_post_hook(lambda *_: updates.append(stepper))
    take_step(stepper, model, *(loss_of(model, seed) for seed in range(num_parts)))
    assert len(updates) == 1


def test_until_the_backward_pass_ends_only_gradients_of_small_vectors_wait() -> None:
    model, seen = make_model(), []
    stepper = make_stepper(model)
    x = torch.ones(7, 5, dtype=torch.float64, requires_grad=True)
    x.register_hook(lambda _: seen.extend(name for name, one in model.named_parameters() if one.grad is not None))
    take_step(stepper, model, model(x).sum())
    assert seen == ["0.bias", "2.bias"]


def test_no_shard_waits() -> None:
    """It may be a view of the gradients of its whole block."""
    stepper = assemble(PROBLEMS["resnet"], knobs_of(stepping="in_backward", offload="parameters"), CPU).stepper
    assert isinstance(stepper, InBackwardStepper)
    assert len(stepper.each()) == len(stepper.optimizers)


def run_out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("sums", SumsIn, ids=lambda sums: sums.name)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_backward_pass_that_fails_leaves_no_gradient(sums: SumsIn, num_parts: int) -> None:
    """The next step may be tried with smaller parts."""
    norms = []
    for fails in (True, False):
        model = make_model(torch.float32)
        parameters = list(model.parameters())
        stepper = InBackwardStepper(parameters, PLAIN_SGD, sums.room_for(parameters), None, Norm.host)
        if fails:
            stepper.begin(2)
            hidden = model[:2](torch.ones(7, 5))
            hidden.register_hook(run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                stepper.backward(model[2](hidden).sum())
            assert model[2].bias.grad is not None
        stepper.begin(num_parts)
        for seed in range(num_parts):
            stepper.backward(loss_of(model, seed))
        norms.append(stepper.update().grad_norm)
    torch.testing.assert_close(*norms, rtol=0 if sums is SumsIn.host else 1e-2, atol=0)


@pytest.mark.parametrize("shares", [(False, True), (True, False), (True, True)], ids=["starts", "stops", "goes on"])
def test_a_state_is_loaded_by_whoever_lets_small_vectors_share_and_who_does_not(
    shares: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with shards don't, one process does: it goes on with what ranks have saved, and the other way around."""
    models, steppers = [make_model(), make_model()], []
    for model, is_shared in zip(models, shares, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(in_backward, "SMALL_NUMEL", SMALL_NUMEL if is_shared else -1)
            steppers.append(make_stepper(model, make=AdamW().make))
    assert [len(stepper.each()) for stepper in steppers] == [3 if is_shared else 4 for is_shared in shares]
    take_step(steppers[0], models[0], loss_of(models[0], 1))
    models[1].load_state_dict(models[0].state_dict())
    steppers[1].load_state_dict(deepcopy(steppers[0].state_dict()))
    for stepper, model in zip(steppers, models, strict=True):
        take_step(stepper, model, loss_of(model, 2))
    assert relative_error(models[1].state_dict(), models[0].state_dict()) == 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["first", "later"])
def test_states_of_early_versions_are_loaded_too(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They don't say which parameters shared an optimizer: none did, or those that do now."""
    models = [make_model(), make_model()]
    with monkeypatch.context() as patch:
        patch.setattr(in_backward, "SMALL_NUMEL", SMALL_NUMEL if is_shared else -1)
        early = make_stepper(models[0], make=AdamW().make)
    now = make_stepper(models[1], make=AdamW().make)
    take_step(early, models[0], loss_of(models[0], 1))
    models[1].load_state_dict(models[0].state_dict())
    state = deepcopy(early.state_dict())
    del state["owners"]
    now.load_state_dict(state)
    for stepper, model in zip((early, now), models, strict=True):
        take_step(stepper, model, loss_of(model, 2))
    assert relative_error(models[1].state_dict(), models[0].state_dict()) == 0


def test_an_optimizer_of_several_groups_goes_on_with_its_state() -> None:
    """Small vectors share it, and its groups stay apart."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [each], "lr": 0.1 / len(each)} for each in parameters])

    models = [make_model(), make_model()]
    first, second = (make_stepper(model, make=make) for model in models)
    take_step(first, models[0], loss_of(models[0], 1))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    for stepper, model in zip((first, second), models, strict=True):
        take_step(stepper, model, loss_of(model, 2))
    assert relative_error(models[1].state_dict(), models[0].state_dict()) == 0


def test_gradients_of_few_bits_are_summed_in_fp32() -> None:
    """64 parts with the same gradient: in bf16 the sum would stop growing."""
    model = make_model().to(torch.bfloat16)
    stepper = make_stepper(model)
    assert isinstance(stepper.sums, HostSums)
    stepper.begin(64)
    for _ in range(64):
        stepper.backward(loss_of(model))
    sums = {parameter: stepper.sums.wait_for(parameter) for parameter in model.parameters()}
    loss_of(model).backward()
    assert all(total.dtype is torch.float32 for total in sums.values())
    stepper.begin(1, torch.tensor(2.0))
    stepper.backward(loss_of(model))
    for parameter, total in sums.items():
        assert torch.equal(total, stepper.sums.wait_for(parameter))


def test_only_two_passes_need_a_graph_that_stays() -> None:
    assert [Fact.RETAINABLE_GRAPH in InBackward(norm=norm).needs() for norm in Norm] == [False, True, False]


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_norm_is_above_zero(clip: float) -> None:
    with pytest.raises(BadInput, match=rf"stepping\.clip={clip}: must be null \(off\) or a norm above 0"):
        InBackward(clip)


def test_dropout_draws_the_same_masks_in_both_passes() -> None:
    """Else the norm would be another graph's."""
    task = InDouble(PROBLEMS["transformer_dropout"])
    for ckpt in ("none", "every1"):
        found, wanted = (
            train(task, knobs_of(optimizer="sgd", stepping=knob, ckpt=ckpt), [8] * 3, lr=0.01)
            for knob in (InBackward(0.3, Norm.two_passes), AfterBackward(0.3))
        )
        assert relative_error(found.parameters, wanted.parameters) <= 1e-12
