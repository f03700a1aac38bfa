"""precision: autocast as torch has it, and a loss scale around any stepper."""

from __future__ import annotations

import math
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import WRITES, conflicts
from lowvram.core.ledger import ledger
from lowvram.core.phases import with_phases
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.core.stepper import Stepper, StepperAround, Update
from lowvram.knobs.norms import KeepOutput
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.precision import SMALLEST_SCALE, Bf16, Fp16, Fp32, ScaledStepper, Tf32
from lowvram.knobs.precision.fp32 import tf32_restored, use_tf32, uses_tf32
from lowvram.knobs.stepping import AfterBackwardStepper
from lowvram.loops.profiling.clock import HostClock
from lowvram.results.row_fields import row_fields
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    KNOBS,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    is_for,
    knobs_of,
    make_batch,
    needs_gpu,
    needs_real_gpu,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("option", DTYPES)
def test_outputs_are_those_of_torchs_autocast(option: str, problem: str) -> None:
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs_of(precision=option), CPU), make_batch(task.spec, 4)
    outputs = rig.forward(batch)
    with torch.autocast("cpu", DTYPES[option]):
        wanted = rig.model(batch.inputs)
    assert outputs.dtype is DTYPES[option]
    assert torch.equal(outputs, wanted)


@pytest.mark.parametrize("option", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_the_loss_and_the_weights_are_fp32(problem: str, option: str) -> None:
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs_of(precision=option), CPU), make_batch(task.spec, 4)
    loss, update = step(rig, batch)
    assert loss.dtype is update.grad_norm.dtype is torch.float32
    assert all(parameter.dtype is torch.float32 for parameter in rig.model.parameters())


@pytest.mark.parametrize("option", DTYPES)
def test_without_a_backward_pass_no_cast_weight_outlives_its_layer(option: str) -> None:
    task = Auto().pose(replace(TRANSFORMER, width=128, num_layers=4), TOKENS)
    rig, batch = assemble(task, knobs_of(precision=option), CPU), make_batch(task.spec, 1)
    with torch.no_grad(), ledger(rig.model) as peak:
        rig.criterion(rig.forward(batch), batch)
    widest_bytes = 2 * 128 * 4 * 128
    assert peak.by_kind_max[Kind.ACTIVATIONS] < 2 * widest_bytes


@pytest.mark.parametrize("option", DTYPES)
def test_the_sum_over_targets_is_not_rounded_to_half(option: str) -> None:
    """The criterion of half-precision logits is that of the same numbers in fp32."""
    task = PROBLEMS["transformer"]
    rig, batch = assemble(task, knobs_of(precision=option), CPU), make_batch(task.spec, 32)
    outputs = rig.forward(batch).detach()
    torch.testing.assert_close(rig.criterion(outputs, batch), task.criterion(outputs.float(), batch), rtol=1e-6, atol=0)


# How CUDA multiplies fp32


@pytest.fixture
def products_afterwards() -> Any:
    with tf32_restored():
        yield


@pytest.mark.parametrize(("knob", "is_tf32"), [(Fp32(), False), (Tf32(), True)])
def test_fp32_products_are_what_is_said(products_afterwards: None, knob: Fp32 | Tf32, is_tf32: bool) -> None:
    use_tf32(not is_tf32)
    knob.apply(assemble(PROBLEMS["transformer"], {}, CPU))
    assert [uses_tf32(is_convolution) for is_convolution in (False, True)] == [is_tf32, is_tf32]


def test_without_tf32(products_afterwards: None) -> None:
    """Why a CPU refuses it: the setting would be accepted, and change nothing."""
    a, b = torch.randn(2, 64, 64)
    exact = a @ b
    use_tf32(True)
    assert torch.equal(a @ b, exact)


@pytest.mark.gpu
@needs_gpu[1]
@needs_real_gpu
def test_tf32_rounds_products_on_a_card(products_afterwards: None) -> None:
    a, b = torch.randn(2, 256, 256, device="cuda")
    use_tf32(False)
    exact = a @ b
    use_tf32(True)
    error = float((a @ b - exact).norm() / exact.norm())
    assert 1e-5 < error < Tf32.band


# The loss scale


class Inner(Stepper):
    """A stepper that applies what it is told to."""

    def __init__(self, *applied: bool) -> None:
        self.applied = list(applied)
        self.calls: list[Any] = []

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.calls.append((num_parts, divisor))

    def backward(self, loss: Tensor) -> None:
        self.calls.append(loss.item())

    def update(self) -> Update:
        return Update(torch.tensor(1.0), self.applied.pop(0))

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        self.calls.append(list(parameters))

    def set_lr(self, lr: float) -> None:
        self.calls.append(lr)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_the_loss_goes_in_too_large_and_the_inner_stepper_is_told_so() -> None:
    inner = Inner(True)
    stepper = ScaledStepper(inner, 8.0, 100)
    stepper.begin(3, divisor=2.0)
    stepper.backward(torch.tensor(0.5))
    stepper.set_lr(0.1)
    assert inner.calls == [(3, 16.0), 4.0, 0.1]


def test_the_scale_halves_at_an_overflow_and_doubles_after_so_many_good_updates() -> None:
    stepper = ScaledStepper(Inner(True, True, True, False, True, True, True, True, True, True, False), 8.0, 3)
    scales = []
    for _ in range(11):
        stepper.update()
        scales.append(stepper.scale)
    assert scales == [8, 8, 16, 8, 8, 8, 16, 16, 16, 32, 16]
    assert stepper.skipped_steps == 2


def test_a_skipped_update_says_whether_a_smaller_scale_can_help() -> None:
    stepper = ScaledStepper(Inner(True, False, False, False), 4 * SMALLEST_SCALE, 100)
    updates = [stepper.update() for _ in range(4)]
    assert [(update.applied, update.recoverable) for update in updates] == [
        (True, False),
        (False, True),
        (False, True),
        (False, False),
    ]


def model_and_stepper(scale: float = 2.0**10, growth_interval: int = 2) -> tuple[nn.Module, ScaledStepper]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    parameters = list(model.parameters())
    inner = AfterBackwardStepper(parameters, AdamW().make(parameters), clip=0.1)
    return model, ScaledStepper(inner, scale, growth_interval)


def take_step(model: nn.Module, stepper: ScaledStepper, size: float = 1.0) -> Update:
    stepper.begin(1)
    stepper.backward(model(torch.full((2, 4), size)).sum())
    return stepper.update()


def numbers(model: nn.Module, stepper: ScaledStepper) -> list[Any]:
    """Parameters and the optimizer's state, as plain values."""
    leaves = tree_leaves([model.state_dict(), stepper.inner.state_dict()])
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def test_a_skipped_step_leaves_parameters_and_state_untouched() -> None:
    model, stepper = model_and_stepper()
    assert take_step(model, stepper).applied
    before = numbers(model, stepper)
    update = take_step(model, stepper, size=1e38)
    assert (update.applied, update.recoverable) == (False, True)
    assert numbers(model, stepper) == before
    assert (stepper.scale, stepper.num_good, stepper.skipped_steps) == (2.0**9, 0, 1)


def test_a_scaled_update_is_the_plain_one() -> None:
    """Clipping included: the scale is a power of two, so not even rounding differs."""
    (model, scaled), (plain_model, plain) = model_and_stepper(), model_and_stepper()
    for _ in range(3):
        scaled_norm = take_step(model, scaled).grad_norm
        plain.inner.begin(1)
        plain.inner.backward(plain_model(torch.ones(2, 4)).sum())
        torch.testing.assert_close(plain.inner.update().grad_norm, scaled_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-6, atol=1e-7)


def test_state_goes_round() -> None:
    model, stepper = model_and_stepper()
    take_step(model, stepper)
    take_step(model, stepper, size=1e38)
    take_step(model, stepper)
    other_model, other = model_and_stepper(scale=1.0)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(deepcopy(stepper.state_dict()))  # torch's optimizers would share its tensors
    for one, its_stepper in ((model, stepper), (other_model, other)):
        take_step(one, its_stepper)
    assert numbers(other_model, other) == numbers(model, stepper)
    assert (other.scale, other.num_good, other.skipped_steps) == (stepper.scale, 2, 1)
    assert other.scale == 2.0**10  # halved once, doubled after two good ones


def test_fp16_trains_with_parts_and_clipping_from_a_scale_that_is_too_large() -> None:
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(precision=Fp16(init_scale=2.0**31), accum="x4"), CPU)
    updates = [step(rig, make_batch(task.spec, 8))[1] for _ in range(25)]
    applied = [update.applied for update in updates]
    assert applied == sorted(applied)  # skipped ones first
    assert 1 <= applied.count(False) < 25
    assert all(update.applied or update.recoverable for update in updates)
    assert rig.stepper.figures()["precision.skipped_steps"] == applied.count(False)


def test_the_scale_is_told_whatever_is_around_its_stepper() -> None:
    def is_wrapped(stepper: Stepper) -> bool:
        return isinstance(stepper, StepperAround) and isinstance(stepper.inner, StepperAround)

    def rig_of(options: dict[str, str]) -> Rig | None:
        knobs = knobs_of(precision=Fp16(init_scale=2.0**30), **options)
        return None if conflicts(knobs, absent_facts(CPU)) else assemble(PROBLEMS["transformer"], knobs, CPU)

    may_wrap = (
        pair for pair, knob in KNOBS.items() if WRITES[knob.stage] & {"stepper", "over_time"} and not knob.libraries
    )
    others = (
        pair for pair in may_wrap if is_for(KNOBS[pair], "transformer") and pair[0] not in ("precision", "optimizer")
    )
    singles = {pair: rig for pair in others if (rig := rig_of(dict([pair])))}
    wrapping = [pair for pair, rig in singles.items() if is_wrapped(rig.stepper)]
    assert {"activations", "sparsity", "adapter", "depth"} <= {group for group, _ in wrapping}
    assert not isinstance(singles["activations", "int8"].stepper, ScaledStepper)
    one_of_each_group = dict(wrapping).items()
    pairs = (rig_of(dict(two)) for two in combinations(one_of_each_group, 2))
    for rig in [*singles.values(), *filter(None, pairs)]:
        marked = with_phases(rig, HostClock())
        figures = marked.stepper.figures()
        assert figures.items() >= {"precision.skipped_steps": 0, "precision.scale": 2.0**30}.items()
        assert figures.keys() <= row_fields().keys()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, 2.0**32, SMALLEST_SCALE / 2])
def test_a_scale_out_of_range_is_named(scale: float) -> None:
    with pytest.raises(BadInput, match=r"precision\.init_scale=.*: must be between"):
        Fp16(init_scale=scale)


def test_the_scale_grows_after_one_update_at_least() -> None:
    with pytest.raises(BadInput, match=r"precision\.growth_interval=0: must be at least 1"):
        Fp16(growth_interval=0)


def test_only_bf16_needs_the_device_to_compute_in_it() -> None:
    assert Bf16().needs() == {Fact.BF16}
    assert not Fp16().needs()


def test_without_own_format() -> None:
    """Under autocast the next layer keeps a cast of a norm's output, so the output is kept in addition to that."""
    task = PROBLEMS["transformer"]
    batch, kept = make_batch(task.spec, 32), list[int]()
    for is_rebuilt in (False, True):
        rig = assemble(task, knobs_of(precision="bf16"), CPU)
        if is_rebuilt:
            rig = KeepOutput().apply(rig)
        rig.stepper.begin(1)
        with ledger(rig.model, None, batch.tensors()) as peak:
            outputs = rig.forward(batch)
        del outputs
        kept.append(peak.by_kind_max[Kind.ACTIVATIONS])
    assert kept[1] >= 0.99 * kept[0]  # norms no longer keep a mean per token
