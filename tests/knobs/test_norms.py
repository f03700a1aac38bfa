"""norms: gradients from a layer norm's output are those from its input, and the input isn't kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.layers import rms_norms
from lowvram.core.step import step
from lowvram.knobs.ckpt import CompilerBudget
from lowvram.knobs.norms import KeepOutput
from lowvram.knobs.norms.from_output import KeepingLayerNorm, KeepingNorm, KeepingRmsNorm
from lowvram.knobs.norms.keep_output import MOST_KEPT, CheckingStepper, check
from tests.core.test_layers import Rms
from tests.laboratory import (
    CPU,
    LARGER,
    PROBLEMS,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    saved_bytes,
    train,
)
from tests.test_laws_foreign import problem

WIDTH = 32


def norm_of(affine: bool = True, bias: bool = True, seed: int = 0) -> nn.LayerNorm:
    torch.manual_seed(seed)
    norm = nn.LayerNorm(WIDTH, elementwise_affine=affine, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2).mul_(torch.randn(WIDTH).sign())
    return norm


def gradients(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return gradients_of(lambda y: (y * torch.linspace(-1, 1, y.numel()).view_as(y)).exp().sum(), norm, x)


def gradients_of_sums(norm: nn.Module, x: Tensor, slopes: Tensor) -> dict[str, Tensor]:
    """The loss is a sum of linear terms, so that huge outputs have no huge gradients."""
    return gradients_of(lambda y: (y * slopes).sum(), norm, x)


def gradients_of(loss: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    loss(norm(x)).backward()
    assert x.grad is not None
    return {"x": x.grad, **{name: each.grad for name, each in norm.named_parameters() if each.grad is not None}}


def checked(norm: nn.Module) -> KeepingNorm:
    """A copy of the norm as it is in a step."""
    copied = deepcopy(norm)
    eps = rms_norms(copied).get(copied)
    keeping = KeepingLayerNorm(copied) if isinstance(copied, nn.LayerNorm) else KeepingRmsNorm(copied, eps or 0.0)
    copied.forward = keeping
    check([keeping])
    return keeping


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_gradients_are_the_same(affine: bool, bias: bool) -> None:
    norm, x = norm_of(affine, bias), 3 + 5 * torch.randn(4, 8, WIDTH)
    keeping = checked(norm)
    assert (keeping.is_sound, keeping.places) == (True, None)
    assert torch.equal(norm(x), keeping.norm(x))
    assert 0 < relative_error(gradients(keeping.norm, x), gradients(norm, x)) < 1e-6


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm, x = norm_of(), torch.randn(4, 8, WIDTH)
    norm.weight.requires_grad_(False)
    found = gradients(checked(norm).norm, x)
    assert found.keys() == {"x", "bias"}
    assert relative_error(found, gradients(norm, x)) < 1e-6


BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SMALLEST = 1e-41  # smaller than any normal number of fp32 and bf16: it has few digits


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("places", [1, WIDTH // 2, WIDTH])
@pytest.mark.parametrize(
    ("weight", "bias", "is_told"),  # does the output tell the normalised input?
    [
        (0.0, 0.5, False),
        (0.0, 0.0, False),
        (-0.0, 0.0, False),
        (1e-8, 0.5, False),
        (1e-8, 0.0, True),
        (SMALLEST, 0.0, None),
        (0.125, 0.5, True),
        (0.124, 0.5, False),
        (-0.01, 0.5, False),
        (1e30, 0.5, True),
        (1e30, 1e34, False),
    ],
)
def test_with_any_weight_gradients_are_the_same(
    weight: float, bias: float, is_told: bool | None, places: int, dtype: torch.dtype
) -> None:
    norm = norm_of().to(dtype)
    with torch.no_grad():
        norm.weight[:places], norm.bias[:places] = weight, bias
    x, slopes = (3 + 5 * torch.randn(64, WIDTH, dtype=dtype) for _ in range(2))
    is_told = (dtype is torch.float64) if is_told is None else is_told
    keeping = checked(norm)
    assert keeping.is_sound == (is_told or places <= MOST_KEPT * WIDTH)
    assert (0 if keeping.places is None else len(keeping.places)) == (places if keeping.is_sound and not is_told else 0)
    found, wanted = (gradients_of_sums(each, x, slopes) for each in (keeping.norm, norm))
    for name in wanted:
        assert relative_error({name: found[name]}, {name: wanted[name]}) < BOUNDS[dtype], name


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("places", [0, 1, WIDTH // 2, WIDTH])
@pytest.mark.parametrize("weight", [0.0, -1e-8, SMALLEST, 1e30])
@pytest.mark.parametrize("kind", [Rms, lambda width: nn.RMSNorm(width, eps=1e-6)], ids=["theirs", "torch"])
def test_with_any_weight_gradients_of_rms_norms_are_the_same(
    kind: Callable[[int], nn.Module], weight: float, places: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = kind(WIDTH).to(dtype)
    with torch.no_grad():
        norm.get_parameter("weight").uniform_(-2, 2)[:places] = weight
    x, slopes = (3 + 5 * torch.randn(8, 8, WIDTH, dtype=dtype) for _ in range(2))
    keeping = checked(norm)
    is_told = weight not in (0, SMALLEST) or (weight == SMALLEST and dtype is torch.float64)
    assert keeping.is_sound == (is_told or places <= MOST_KEPT * WIDTH)
    assert torch.equal(keeping.norm(x), norm(x))
    found, wanted = (gradients_of_sums(each, x, slopes) for each in (keeping.norm, norm))
    assert found.keys() == {"x", "weight"}
    for name in wanted:
        assert relative_error({name: found[name]}, {name: wanted[name]}) < BOUNDS[dtype], name


def test_nan_and_infinite_weights_have_the_input_kept() -> None:
    for value in (math.nan, math.inf):
        norm = norm_of()
        nn.init.constant_(norm.bias, value)
        assert not checked(norm).is_sound
    norm = norm_of()
    nn.init.constant_(norm.weight, math.nan)
    assert not checked(norm).is_sound


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), Rms(WIDTH)], ids=["layer norm", "RMS norm"])
def test_weights_may_have_more_bits_than_what_they_multiply(norm: nn.Module) -> None:
    """As where a model keeps its norms in fp32."""
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    found, wanted = (gradients_of_sums(each, x, x) for each in (checked(norm).norm, norm))
    assert [found[name].dtype for name in wanted] == [each.dtype for each in wanted.values()]
    assert relative_error(found, wanted) < BOUNDS[torch.bfloat16]


def test_places_of_images_are_kept() -> None:
    """Norms over several dimensions."""
    torch.manual_seed(0)
    norm, x = nn.LayerNorm([3, 4, 5]), torch.randn(6, 2, 3, 4, 5)
    with torch.no_grad():
        norm.weight[1, 2, 3] = 0
    keeping = checked(norm)
    assert keeping.places is not None
    assert keeping.places.tolist() == [1 * 20 + 2 * 5 + 3]
    assert relative_error(gradients(keeping.norm, x), gradients(norm, x)) < 1e-6


def test_each_step_looks_at_the_weights_anew() -> None:
    task = PROBLEMS["transformer"]
    rig, plain = (assemble(task, knobs_of(norms=norms, optimizer="sgd"), CPU) for norms in ("output", "input"))
    assert isinstance(rig.stepper, CheckingStepper)
    batch = make_batch(task.spec, 32)
    for weight, num_kept in ((0.0, 1), (0.01, 1), (0.5, 0)):
        for each in (rig, plain):
            first = next(module for module in each.model.modules() if isinstance(module, nn.LayerNorm))
            with torch.no_grad():
                first.bias.fill_(0.5)
                first.weight[3] = weight
            step(each, batch)
        kept = [0 if norm.places is None else len(norm.places) for norm in rig.stepper.norms]
        assert kept == [num_kept] + [0] * 6
        assert relative_error(rig.model.state_dict(), plain.model.state_dict()) < 1e-6


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
    block = task.structure(rig.model).blocks[0]
    block.mlp_norm = derived = Derived(16)
    KeepOutput().apply(rig)
    assert "forward" not in vars(derived)
    assert "forward" in vars(block.attention_norm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "others",
    [
        {"ckpt": "every1"},
        {"ckpt": "selective"},
        {"offload": "activations"},
        {"stepping": "in_backward"},
        {"adapter": "lora"},
        {"accum": "x4"},
        {"tile": "blocks"},
        {"tile": "mlp"},
        {"logits": "tiled"},
        {"stepping": "cpu_offload"},
    ],
    ids=str,
)
def test_with_other_knobs_gradients_are_the_same(others: dict[str, str | Knob]) -> None:
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(norms=norms, optimizer="sgd", **others), [16, 16], lr=0.01)
        for norms in ("output", "input")
    )
    assert 0 < relative_error(found.gradients, wanted.gradients) < 2e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("others", [{}, {"ckpt": "every1"}, {"precision": "bf16_pure"}], ids=str)
@pytest.mark.parametrize("kind", ["transformer", "llama"])
def test_the_plan_is_what_is_measured(kind: str, others: dict[str, str | Knob]) -> None:
    task = problem(kind) if kind == "llama" else LARGER[kind]
    planned = peak_as_planned(task, knobs_of(norms="output", **others), 32)
    found, usual = (peak_as_measured(task, knobs_of(norms=norms, **others), 32) for norms in ("output", "input"))
    assert found.by_kind_max[Kind.ACTIVATIONS] == planned.by_kind_max[Kind.ACTIVATIONS]
    assert found.by_kind_max[Kind.ACTIVATIONS] < usual.by_kind_max[Kind.ACTIVATIONS]


def test_without_compiled() -> None:
    """The model runs eagerly: the compiler's budget is nobody's."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(norms="output"), CPU)
    assert CompilerBudget(0.0).apply(rig) is rig
    assert not any(module._compiled_call_impl for module in rig.model.modules())


def test_a_norm_whose_output_is_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    x, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    rig = lowvram.assemble(lowvram.task(model, x), "norms=output", "cpu")
    with pytest.raises(Incompatible, match=r"norms=output needs that nothing changes the output of a norm in place"):
        lowvram.step(rig, lowvram.Part(x, targets))
