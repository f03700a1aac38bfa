"""norms: gradients from a layer norm's output are those from its input, and the input isn't kept."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.assemble import assemble
from lowvram.core.knob import Kind, Knob
from lowvram.core.ledger import Peak, ledger
from lowvram.core.step import step
from lowvram.knobs.ckpt import CompilerBudget
from lowvram.knobs.norms import CheckingStepper, KeepOutput, Rebuilding
from tests.laboratory import (
    CPU,
    LARGER,
    PROBLEMS,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
    saved_bytes,
    train,
)

WIDTH = 32


def norm_of(affine: bool = True, bias: bool = True, seed: int = 0) -> nn.LayerNorm:
    torch.manual_seed(seed)
    norm = nn.LayerNorm(WIDTH, elementwise_affine=affine, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2).mul_(torch.randn(WIDTH).sign())
    return norm


def gradients(norm: nn.LayerNorm, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    (norm(x) * torch.linspace(-1, 1, x.numel()).view_as(x)).exp().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{name: each.grad for name, each in norm.named_parameters() if each.grad is not None}}


def rebuilding(norm: nn.LayerNorm) -> nn.LayerNorm:
    found = deepcopy(norm)
    found.forward = Rebuilding(found)
    return found


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_gradients_are_the_same(affine: bool, bias: bool) -> None:
    norm, x = norm_of(affine, bias), 3 + 5 * torch.randn(4, 8, WIDTH)
    assert torch.equal(norm(x), rebuilding(norm)(x))
    assert 0 < relative_error(gradients(rebuilding(norm), x), gradients(norm, x)) < 1e-6


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm, x = norm_of(), torch.randn(4, 8, WIDTH)
    norm.weight.requires_grad_(False)
    found = gradients(rebuilding(norm), x)
    assert found.keys() == {"x", "bias"}
    assert relative_error(found, gradients(norm, x)) < 1e-6


@pytest.mark.parametrize("value", [0.0, 1e-3, math.nan])
def test_a_weight_too_small_beside_its_bias_has_the_input_kept(value: float) -> None:
    task = PROBLEMS["transformer"]
    rig, plain = (assemble(task, knobs_of(norms=norms, optimizer="sgd"), CPU) for norms in ("output", "input"))
    assert isinstance(rig.stepper, CheckingStepper)
    for each in (rig, plain):
        first = next(module for module in each.model.modules() if isinstance(module, nn.LayerNorm))
        with torch.no_grad():
            first.bias.fill_(0.5)
            first.weight[3] = value
    batch = make_batch(task.spec, 32)
    if not math.isnan(value):
        step(rig, batch)
        step(plain, batch)
        weights, wanted = rig.model.state_dict(), plain.model.state_dict()
        assert relative_error(weights, wanted) < 1e-6
    rig.stepper.begin(1)
    assert [each.is_sound for each in rig.stepper.norms] == [False] + [True] * 6


def test_a_weight_that_has_recovered_has_the_output_kept() -> None:
    norm = norm_of()
    stepper = CheckingStepper(assemble(PROBLEMS["transformer"], knobs_of(), CPU).stepper, [Rebuilding(norm)])
    for weight, is_sound in ((0.01, False), (0.5, True)):
        nn.init.constant_(norm.weight, weight)
        stepper.begin(1)
        assert stepper.norms[0].is_sound == is_sound


def test_each_norm_keeps_its_input_no_longer() -> None:
    task = LARGER["transformer"]
    batch = make_batch(task.spec, 32)
    keeping_input, keeping_output = (saved_bytes(task, knobs_of(norms=norms), batch) for norms in ("input", "output"))
    num_tokens = 32 * 8
    assert keeping_input - keeping_output == 7 * num_tokens * (64 + 1) * 4  # with the means


def test_classes_derived_from_layer_norm_stay() -> None:
    class Derived(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(), CPU)
    block = task.blocks(rig.model)[0]
    block.mlp_norm = derived = Derived(16)
    KeepOutput().apply(rig)
    assert "forward" not in vars(derived)
    assert "forward" in vars(block.attention_norm)


@pytest.mark.parametrize(
    "others",
    [
        {"ckpt": "every1"},
        {"ckpt": "selective"},
        {"offload": "activations"},
        {"stepping": "in_backward"},
        {"adapter": "lora"},
        {"accum": "x4"},
    ],
    ids=str,
)
def test_with_other_knobs_gradients_are_the_same(others: dict[str, str | Knob]) -> None:
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(norms=norms, optimizer="sgd", **others), [16, 16], lr=0.01)
        for norms in ("output", "input")
    )
    assert 0 < relative_error(found.gradients, wanted.gradients) < 2e-6


def peak_of(**choices: str | Knob) -> Peak:
    task = LARGER["transformer"]
    rig, batch = assemble(task, knobs_of(**choices), CPU), make_batch(task.spec, 32)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


@pytest.mark.parametrize("others", [{}, {"ckpt": "every1"}, {"precision": "bf16_pure"}], ids=str)
def test_the_plan_is_what_is_measured(others: dict[str, str | Knob]) -> None:
    planned, found = (
        peak_as_planned(LARGER["transformer"], knobs_of(norms="output", **others), 32),
        peak_of(norms="output", **others),
    )
    assert found.by_kind_max[Kind.ACTIVATIONS] == planned.by_kind_max[Kind.ACTIVATIONS]


def test_without_compiled() -> None:
    """The model runs eagerly: the compiler's budget is nobody's."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(norms="output"), CPU)
    assert CompilerBudget(0.0).apply(rig) is rig
    assert not any(module._compiled_call_impl for module in rig.model.modules())
