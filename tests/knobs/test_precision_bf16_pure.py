"""precision=bf16_pure: what is bf16 and what isn't, and that it learns as fp32 does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob
from lowvram.core.rig import Part
from lowvram.core.rounding import Rounding
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.precision import Bf16Pure
from lowvram.knobs.precision.bf16_pure import Bf16Weights, batch_norm, to_bf16, with_bf16_inputs
from lowvram.knobs.stepping import ZerothOrder
from lowvram.tasks import Auto
from tests.laboratory import CPU, DEVICES, PROBLEMS, TRANSFORMER, knobs_of, make_batch, relative_error
from tests.tiers import first_of


@pytest.mark.parametrize("problem", PROBLEMS)
def test_weights_are_the_rounded_ones_of_fp32(problem: str) -> None:
    """Strides, ties and buffers stay."""
    task = PROBLEMS[problem]
    plain, pure = (assemble(task, knobs_of(precision=which), CPU).model for which in ("fp32", "bf16_pure"))
    assert [name for name, _ in pure.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for one, other in zip(pure.parameters(), plain.parameters(), strict=True):
        assert one.dtype is torch.bfloat16
        assert torch.equal(one, other.bfloat16())
        assert one.stride() == other.stride()
    assert dict(pure.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    assert all(buffer.dtype is not torch.bfloat16 for buffer in pure.buffers())


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_outputs_and_gradients_are_bf16_and_the_loss_fp32(problem: str) -> None:
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs_of(precision="bf16_pure"), CPU), make_batch(task.spec, 4)
    outputs = rig.forward(batch)
    loss = rig.criterion(outputs, batch)
    loss.backward()
    assert (outputs.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {parameter.grad.dtype for parameter in rig.trainable if parameter.grad is not None} == {torch.bfloat16}


def test_statistics_stay_fp32_and_other_buffers_do_not() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[1].register_buffer("table", torch.ones(2))
    to_bf16(model)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes == {
        "0.running_mean": torch.float32,
        "0.running_var": torch.float32,
        "0.num_batches_tracked": torch.int64,
        "1.table": torch.bfloat16,
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_batch_norm_is_torchs(options: dict[str, float | bool | None], training: bool) -> None:
    ours, theirs = (nn.BatchNorm2d(3, **options).train(training) for _ in range(2))  # pyright: ignore[reportArgumentType]
    for x in torch.randn(3, 4, 3, 5, 5):
        torch.testing.assert_close(batch_norm(ours, x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_numbers_of_tokens_are_not_rounded() -> None:
    tokens, images = torch.tensor([[50_256]]), torch.ones(1, 3)
    inputs, named = with_bf16_inputs(nn.Identity(), (tokens, images), {"tokens": tokens, "images": images})
    assert inputs[0] is named["tokens"] is tokens
    assert inputs[1].dtype is named["images"].dtype is torch.bfloat16


class Moved(ZerothOrder):
    """Moves weights forth and back, and doesn't ask how they are kept."""

    def needs(self) -> frozenset[Fact]:
        return frozenset()


def test_without_fp32_weights() -> None:
    """Weights that are moved and moved back don't come back: rounding leaves a thousandth of each."""
    errors = {}
    for precision in ("fp32", "bf16_pure", "bf16_split"):
        rig = assemble(PROBLEMS["transformer"], knobs_of(precision=precision, stepping=Moved(), optimizer="sgd"), CPU)
        weights = dict(rig.model.named_parameters())
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        rig.stepper.set_lr(0.0)
        assert step(rig, make_batch(PROBLEMS["transformer"].spec, 4))[1].applied
        errors[precision] = relative_error(weights, before)
    assert errors["fp32"] < 1e-6
    assert min(errors["bf16_pure"], errors["bf16_split"]) > 1e-3


# Curves


COUNTING = Auto().pose(replace(TRANSFORMER, num_layers=2, width=32, context=16), DataSpec(Modality.TOKENS, 31, (16,)))
BAND = 0.02  # of the loss, all along
NUM_STEPS = 120


def counting(seed: int) -> Part:
    """Sequences that count by a step of their own."""
    draw = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, most, (16, 1), generator=draw) for most in (31, 4))
    numbers = (start + stride * torch.arange(17)) % 31
    return Part(numbers[:, :-1], numbers[:, 1:])


class ToNearest(Rounding):
    def write(self, weight: Tensor, correction: Tensor | None, exact: Tensor) -> None:
        weight.copy_(exact)


@dataclass(frozen=True)
class Nearest(Bf16Weights):
    """What one would do without a thought: weights are rounded to the nearest."""

    def rounding(self) -> Rounding:
        return ToNearest()


def curve(precision: str | Knob, optimizer: str | Knob, device: torch.device = CPU) -> Tensor:
    """The loss of every step, smoothed over ten."""
    rig = assemble(COUNTING, knobs_of(precision=precision, optimizer=optimizer), device)
    losses = torch.stack([step(rig, counting(seed).to(device))[0] for seed in range(NUM_STEPS)])
    return losses.cpu().unfold(0, 10, 1).mean(1)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "optimizer",
    first_of(["adamw", "adamw_8bit", "sgd", "adafactor", "muon", "apollo", "galore", "sinkgd", "adam_mini"]),
)
@pytest.mark.slow
def test_it_learns_as_fp32_does(optimizer: str, device: torch.device) -> None:
    wanted = curve("fp32", optimizer, device)
    assert wanted[-1] < 0.8 * wanted[0]
    assert float(((curve("bf16_pure", optimizer, device) - wanted) / wanted).abs().max()) < BAND


@pytest.mark.slow
def test_rounding_to_the_nearest_stalls_where_this_does_not() -> None:
    """Small steps: a learning rate of 2e-4 against weights of 0.02 and norms of 1."""
    small = AdamW(lr=2e-4)
    wanted = curve("fp32", small)
    errors = {type(knob): ((curve(knob, small) - wanted) / wanted).abs().max() for knob in (Bf16Pure(), Nearest())}
    assert errors[Bf16Pure] < BAND / 4
    assert errors[Nearest] > 4 * errors[Bf16Pure]


def test_a_weight_moves_by_steps_that_rounding_to_the_nearest_would_lose() -> None:
    """100 steps of 1e-3 / 2 from 1, where bf16 has no number between 0.996 and 1."""
    moved = {}
    for knob in (Bf16Pure(), Nearest()):
        rounding = knob.apply(assemble(PROBLEMS["transformer"], {}, CPU)).rounding
        assert rounding is not None
        rig = assemble(
            PROBLEMS["transformer"], knobs_of(precision=knob, optimizer=AdamW(lr=5e-4, weight_decay=0.0)), CPU
        )
        weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        optimizer = rig.make_optimizer([weight])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[type(knob)] = float(1 - weight.detach().float().mean())
    assert moved[Bf16Pure] == pytest.approx(0.05, rel=0.02)
    assert moved[Nearest] == 0.0
