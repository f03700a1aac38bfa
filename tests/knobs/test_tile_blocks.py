"""tile=blocks: samples in chunks give the same numbers, are computed twice in all, and hand each gradient over once."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.api import task as task_of
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import Peak
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.stepping import InBackward
from lowvram.knobs.tile import TiledBlocks
from lowvram.models.hf import HfConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    KNOBS,
    PROBLEMS,
    TOKENS,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)
from tests.ranks import on_ranks
from tests.test_laws import error_of

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

TASK = PROBLEMS["transformer"]  # 3 blocks
SIZES = [32, 32, 27]
BAND = TiledBlocks.band


def trained(tile: str | Knob, task: Problem | InDouble = TASK, **choices: str | Knob) -> Trained:
    return train(task, knobs_of(optimizer="sgd", tile=tile, **choices), SIZES, lr=0.01)


# Numbers


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "band"), [(torch.float32, BAND), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("problem", ["transformer", "resnet_group", "resnet_frozen"])
@pytest.mark.parametrize("samples", [1, 10])
def test_losses_and_gradients_are_the_same(samples: int, problem: str, dtype: torch.dtype, band: float) -> None:
    """`resnet_frozen` has its channels last, and BatchNorms that don't look at the batch."""
    error = error_of("tile", TiledBlocks(samples), problem, dtype)
    assert error <= band
    assert error > 0 or problem == "resnet_frozen"  # whose sums are in the same order on some processors


def test_with_few_samples_nothing_changes_to_the_bit() -> None:
    assert error_of("tile", TiledBlocks(32), "transformer", torch.float32) == 0


@pytest.mark.parametrize("ckpt", ["none", "every1", "every2", "selective"])
def test_each_sample_is_computed_twice_whatever_ckpt_recomputes(ckpt: str) -> None:
    rig, seen = assemble(TASK, knobs_of(ckpt=ckpt, tile=TiledBlocks(10)), CPU), list[int]()
    up = TASK.structure(rig.model).blocks[1].get_submodule("mlp.up")
    up.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    step(rig, make_batch(TASK.spec, 32))
    assert seen == 2 * [10, 10, 10, 2]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_gradient_arrives_once(clip: float | None) -> None:
    task, stepping = InDouble(TASK), InBackward(clip=clip)
    found = trained(TiledBlocks(10), task, stepping=stepping)
    wanted = trained("none", task, stepping=stepping.reference())
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12
    rig, calls = assemble(TASK, knobs_of(tile=TiledBlocks(10)), CPU), Counter[str]()
    for name, parameter in rig.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    step(rig, make_batch(TASK.spec, 32))
    assert calls == dict.fromkeys(dict(rig.model.named_parameters()), 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_number_formats_stay_in_their_bands(precision: str) -> None:
    wanted = trained("none", InDouble(TASK)).gradients
    errors = [relative_error(trained(tile, precision=precision).gradients, wanted) for tile in ("none", TiledBlocks())]
    # Gradients in bf16 are rounded once more with each of 32 samples: to a standard deviation of 2**-9 / 3**0.5 at most
    # of a sum so far, whose square is half of the whole one's on average.
    rounding = 2**-9 * math.sqrt(32 / 2 / 3) if precision == "bf16_pure" else 0
    assert errors[1] <= 1.1 * math.hypot(errors[0], rounding)
    assert 1.1 * errors[0] <= KNOBS["precision", precision].band


@pytest.mark.parametrize("adapter", ["lora", "freeze"])
def test_frozen_weights_get_no_gradient(adapter: str) -> None:
    found, wanted = (trained(tile, adapter=adapter) for tile in (TiledBlocks(10), "none"))
    assert found.gradients.keys() == wanted.gradients.keys() < found.parameters.keys()
    assert relative_error(found.gradients, wanted.gradients) <= BAND


def test_dropout_draws_the_same_masks_in_both_passes() -> None:
    """Other ones than without tiles: the losses are about the same, and gradients fit the losses."""
    task = InDouble(PROBLEMS["transformer_dropout"])
    rig, batch = assemble(task, knobs_of(tile=TiledBlocks(3), optimizer="sgd"), CPU), make_batch(TASK.spec, 8)
    part = Part(batch.inputs, batch.targets)
    weight = TASK.structure(rig.model).blocks[0].get_parameter("mlp.up.weight")

    def loss() -> Tensor:
        torch.manual_seed(0)
        return rig.criterion(rig.forward(part), part)

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction, size = torch.randn_like(weight), 1e-5
    with torch.no_grad():
        weight.add_(direction, alpha=size)
        above = loss()
        weight.sub_(direction, alpha=2 * size)
        below = loss()
    assert float((above - below) / (2 * size)) == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


# Models of others


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "modality"), [("gpt2", "TOKENS"), ("llama", "TOKENS"), ("bert", "LABELLED_TOKENS")])
def test_models_of_transformers(kind: str, modality: str) -> None:
    spec = TOKENS if modality == "TOKENS" else DataSpec(Modality[modality], 5, (8,), vocab_size=300)
    task = Auto().pose(HfConfig(tiny(kind)), spec)
    found, wanted = (trained(tile, task, ckpt="every1") for tile in (TiledBlocks(5), "none"))
    assert 0 < relative_error(found.gradients, wanted.gradients) <= 2 * BAND


class Mixed(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x_bd: Tensor) -> Tensor:
        return x_bd + self.body(x_bd - x_bd.mean(0))


class Apart(Mixed):
    def forward(self, x_bd: Tensor) -> Tensor:
        return x_bd + self.body(x_bd)


@pytest.mark.parametrize(("kind", "is_refused"), [(Mixed, True), (Apart, False)])
def test_a_module_of_the_users_own(kind: type[nn.Module], is_refused: bool) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(*(kind() for _ in range(3)), nn.Linear(8, 5)), torch.randn(9, 8)
    task = task_of(module, inputs, blocks=kind.__name__)
    if is_refused:
        with pytest.raises(Incompatible, match="needs that the blocks compute each sample from that sample alone"):
            assemble(task, knobs_of(tile="blocks"), CPU)
        return
    loss = lambda: module(inputs).square().sum()  # noqa: E731
    wanted = torch.autograd.grad(loss(), list(module.parameters()))
    assemble(task, knobs_of(tile=TiledBlocks(4)), CPU)
    for found, gradient in zip(torch.autograd.grad(loss(), list(module.parameters())), wanted, strict=True):
        assert torch.allclose(found, gradient, rtol=1e-5, atol=1e-6)


def test_batch_norm_is_refused() -> None:
    with pytest.raises(Incompatible, match="each sample from that sample alone"):
        assemble(PROBLEMS["resnet"], knobs_of(tile="blocks"), CPU)


# Memory

WIDE = Auto().pose(
    TransformerConfig(num_layers=3, width=32, num_heads=2, context=64), DataSpec(Modality.TOKENS, 11, (64,))
)


def peak_of(**choices: str | Knob) -> Peak:
    return peak_as_measured(WIDE, knobs_of(**choices), 16)


def test_it_saves_more_than_recomputing_whole_blocks() -> None:
    """What stays: the inputs of the blocks, and a gradient or two like them."""
    peaks = [peak_of(ckpt=ckpt, tile=tile) for ckpt, tile in (("none", "none"), ("every1", "none"), ("none", "blocks"))]
    all_kept, recomputed, tiled = (peak.by_kind_max[Kind.ACTIVATIONS] for peak in peaks)
    assert tiled <= 0.6 * recomputed <= 0.3 * all_kept


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choices", [{}, {"ckpt": "every1", "stepping": "in_backward"}, {"precision": "bf16"}], ids=str)
def test_a_plan_is_right_to_the_byte(choices: dict[str, str]) -> None:
    knobs: dict[str, Any] = {**choices, "tile": TiledBlocks(3)}
    planned, found = peak_as_planned(WIDE, knobs_of(**knobs), 16), peak_of(**knobs)
    assert (planned.peak_bytes, planned.by_kind_max) == (found.peak_bytes, found.by_kind_max)


# With others


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_compiled_blocks_learn_the_same() -> None:
    found = train(TASK, knobs_of(compile="blocks", tile=TiledBlocks(16)), [32])
    wanted = train(TASK, knobs_of(), [32])
    assert relative_error(found.gradients, wanted.gradients) <= KNOBS["compile", "blocks"].band


@pytest.mark.parametrize("option", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_train_like_one_process(option: str) -> None:
    task = InDouble(TASK)
    wanted = train(task, knobs_of(optimizer="sgd"), [8, 8])
    for found in on_ranks(train, task, knobs_of(sharding=option, optimizer="sgd", tile=TiledBlocks(3)), [8, 8]):
        assert relative_error(found.parameters, wanted.parameters) <= 1e-12


def test_no_samples_are_refused() -> None:
    with pytest.raises(BadInput, match=r"tile\.samples=0: must be at least 1"):
        TiledBlocks(samples=0)
