"""stepping=cpu_offload: what lies on the host, masters of few-bit weights, and the whole state."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import Peak, ledger
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD, AdamW
from lowvram.knobs.stepping import CpuOffload, CpuOffloadStepper
from lowvram.knobs.stepping import cpu_offload as module
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    IMAGES,
    RESNET,
    TOKENS,
    TRANSFORMER,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
)

WIDE = {
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=4, width=64), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16, layers=[2, 2]), IMAGES),
}


def measured(problem: str, **choices: Any) -> Peak:
    """The ledger of the second step."""
    rig, batch = assemble(WIDE[problem], knobs_of(**choices), CPU), make_batch(WIDE[problem].spec, 16)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


@pytest.mark.sampled
@pytest.mark.parametrize("problem", WIDE)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("accum", ["none", "x4"])
def test_state_and_gradients_leave_the_device(problem: str, optimizer: str, accum: str) -> None:
    choices = {"optimizer": optimizer, "accum": accum}
    plain, found = measured(problem, **choices), measured(problem, stepping="cpu_offload", **choices)
    for kind in (Kind.OPTIMIZER, Kind.GRADIENTS):
        assert found.by_kind_max[kind] <= 0.05 * plain.by_kind_max[kind]
    masters = plain.by_kind_max[Kind.GRADIENTS]  # of the same size
    moved = plain.by_kind_max[Kind.OPTIMIZER] + plain.by_kind_max[Kind.GRADIENTS] + masters
    assert found.by_kind_max[Kind.HOST] == pytest.approx(moved, rel=0.01)
    assert found.peak_bytes < plain.peak_bytes
    assert found.by_kind_max[Kind.OTHER] == 0


def test_temporaries_of_the_update_are_the_hosts_too() -> None:
    plain, found = (measured("resnet", stepping=s, optimizer="adafactor") for s in ("after_backward", "cpu_offload"))
    assert plain.by_kind_max[Kind.OTHER] > found.by_kind_max[Kind.OTHER] == 0


def test_on_paper_it_is_the_same() -> None:
    found = measured("resnet", stepping="cpu_offload", accum="x4")
    on_paper = peak_as_planned(WIDE["resnet"], knobs_of(stepping="cpu_offload", accum="x4"), 16)
    assert on_paper.by_kind_max == found.by_kind_max


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8])
def test_a_fraction_of_the_state_is_on_the_host(fraction: float) -> None:
    whole = measured("transformer", stepping="after_backward").by_kind_max[Kind.OPTIMIZER]
    found = measured("transformer", stepping=CpuOffload(offload_fraction=fraction)).by_kind_max[Kind.OPTIMIZER]
    assert found == pytest.approx((1 - fraction) * whole, abs=0.03 * whole)


def test_what_travels_is_counted() -> None:
    rig = assemble(WIDE["transformer"], knobs_of(stepping="cpu_offload", accum="x4"), CPU)
    size, before = sum(parameter.nbytes for parameter in rig.trainable), replace(host.traffic)
    step(rig, make_batch(TOKENS, 16))
    assert host.traffic.to_host_bytes - before.to_host_bytes == 4 * size
    assert host.traffic.to_device_bytes - before.to_device_bytes == size


# On a small model of its own


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def make_stepper(model: nn.Module, fraction: float = 1.0) -> CpuOffloadStepper:
    return CpuOffloadStepper(list(model.parameters()), AdamW().make, None, fraction)


def take_step(stepper: CpuOffloadStepper, model: nn.Module, seed: int = 0, scale: float = 1.0) -> bool:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    stepper.begin(1)
    stepper.backward(model(x).square().sum() * scale)
    return stepper.update().applied


def numbers(state: Any) -> list[Any]:
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(state)]


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_a_gradient_that_is_not_finite_changes_nothing(fraction: float) -> None:
    model = make_model()
    stepper = make_stepper(model, fraction)
    assert take_step(stepper, model)
    before = numbers([model.state_dict(), stepper.state_dict()])
    assert not take_step(stepper, model, scale=1e38)
    assert numbers([model.state_dict(), stepper.state_dict()]) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert take_step(stepper, model)


@pytest.mark.parametrize("bucket_bytes", [1, 2**24])
def test_buckets_hold_every_parameter_once(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
    models = [make_model(), make_model()]
    steppers = [make_stepper(models[0]), CpuOffloadStepper(list(models[1].parameters()), AdamW().make, None, 0.0)]
    assert len(steppers[0].buckets) == (4 if bucket_bytes == 1 else 1)
    for stepper, model in zip(steppers, models, strict=True):
        take_step(stepper, model)
    assert relative_error(models[0].state_dict(), models[1].state_dict()) == 0


def test_masters_keep_what_weights_of_few_bits_would_lose() -> None:
    """Updates below half the spacing of bf16 add up; a weight is its master, rounded to the nearest."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    stepper = CpuOffloadStepper([weight], SGD(lr=1e-4, momentum=0.0).make, None, 1.0)
    values = []
    for _ in range(100):
        stepper.begin(1)
        stepper.backward(weight.float().sum())
        assert stepper.update().applied
        values.append(weight[0].item())
    assert values[0] == 1.0
    assert values[-1] == torch.tensor(0.99).bfloat16().item()
    assert stepper.masters[weight].dtype is torch.float32
    assert torch.equal(weight, stepper.masters[weight].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_state_goes_round_through_a_file(dtype: torch.dtype, fraction: float) -> None:
    """Model first, then stepper, as a snapshot is restored: the masters are the fp32 ones, not the weights'."""
    model, fresh = make_model(dtype), make_model(dtype)
    stepper = make_stepper(model, fraction)
    for seed in range(3):
        take_step(stepper, model, seed)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "stepper": stepper.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    assert all(type(leaf) is Tensor for leaf in tree_leaves(state["stepper"]) if isinstance(leaf, Tensor))
    other = make_stepper(fresh, fraction)
    fresh.load_state_dict(state["model"])
    other.load_state_dict(state["stepper"])
    for one, its_model in ((stepper, model), (other, fresh)):
        take_step(one, its_model, seed=9)
    assert numbers([fresh.state_dict(), other.state_dict()]) == numbers([model.state_dict(), stepper.state_dict()])


def test_loaded_state_is_host_memory_too() -> None:
    model = make_model()
    stepper, other = make_stepper(model), make_stepper(make_model())
    take_step(stepper, model)
    other.load_state_dict(stepper.state_dict())
    with ledger(model, other) as peak:
        pass
    assert peak.by_kind_max[Kind.OPTIMIZER] == 0


def test_weights_that_are_loaded_later_are_followed() -> None:
    model, source = make_model(), make_model()
    stepper = make_stepper(model)
    take_step(stepper, model)
    source.load_state_dict({name: value + 1 for name, value in source.state_dict().items()})
    model.load_state_dict(source.state_dict())
    stepper.set_lr(0.0)
    take_step(stepper, model)
    assert relative_error(model.state_dict(), source.state_dict()) == 0


def test_the_state_of_another_fraction_is_refused() -> None:
    state = make_stepper(make_model(), 0.5).state_dict()
    with pytest.raises(
        BadInput, match=r"stepping\.offload_fraction=1\.0: must be what it was when this state was saved"
    ):
        make_stepper(make_model()).load_state_dict(state)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_a_fraction_is_between_0_and_1(fraction: float) -> None:
    with pytest.raises(BadInput, match=r"stepping\.offload_fraction=.*: must be between 0"):
        CpuOffload(offload_fraction=fraction)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_norm_is_above_zero(clip: float) -> None:
    with pytest.raises(BadInput, match=rf"stepping\.clip={clip}: must be null \(off\) or a norm above 0"):
        CpuOffload(clip)
