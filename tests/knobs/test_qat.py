"""qat: which layers round their weights, that an export in as few bits has the same ones, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble, skeleton
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.export.format import Trained
from lowvram.export.weights import FewBits, int4, int8
from lowvram.knobs.qat import FakeQuantized, Int4, Int8
from lowvram.tasks import Auto
from tests.laboratory import CPU, PROBLEMS, TOKENS, TRANSFORMER, knobs_of, make_batch

WIDE = Auto().pose(replace(TRANSFORMER, width=32), TOKENS)
BATCH = make_batch(TOKENS, 9)
LAYERS = ("attention.qkv", "attention.merge", "mlp.up", "mlp.down")


def exchanged(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "FakeQuantizedLinear"}


def trained(qat: str | Knob) -> Rig:
    rig = assemble(WIDE, knobs_of(qat=qat), CPU)
    for _ in range(3):
        step(rig, BATCH)
    rig.model.eval()
    return rig


IN_FILES = {"int8": (Int8(), int8()), "int4": (Int4(), int4(32)), "int4 in groups of 16": (Int4(16), int4(16))}


@pytest.mark.parametrize("qat", ["int8", "int4"])
def test_linear_layers_are_exchanged_but_for_the_last(qat: str) -> None:
    model = skeleton(WIDE, knobs_of(qat=qat))
    assert exchanged(model) == {f"blocks.{block}.{layer}" for block in range(3) for layer in LAYERS}


def test_rows_of_one_number_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    x, targets = torch.randn(3, 1), torch.tensor([0, 1, 1])
    loss, _ = lowvram.step(lowvram.assemble(lowvram.task(model, x), "qat=int8", "cpu"), lowvram.Part(x, targets))
    assert loss.isfinite()
    assert exchanged(model) == {"1"}
    with pytest.raises(BadInput, match="no inner layer has more than one input"):
        lowvram.assemble(lowvram.task(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2)), x), "qat=int8", "cpu")


def test_rows_that_groups_do_not_divide_stay_as_they_are() -> None:
    task = PROBLEMS["transformer"]  # 16 wide
    assert exchanged(skeleton(task, knobs_of(qat="int4"))) == {f"blocks.{block}.mlp.down" for block in range(3)}
    with pytest.raises(BadInput, match=r"^qat='int4': must be another option: the rows of no linear layer"):
        assemble(task, knobs_of(qat=Int4(group=128)), CPU)


@pytest.mark.parametrize(("qat", "written"), IN_FILES.values(), ids=IN_FILES)
def test_an_export_in_as_few_bits_computes_the_same(qat: FakeQuantized, written: FewBits, tmp_path: Path) -> None:
    rig = trained(qat)
    plain = assemble(WIDE, knobs_of(), CPU).model.eval()
    plain.load_state_dict(rig.model.state_dict())
    written.write(Trained(plain, WIDE, []), tmp_path)
    loaded = written.load(tmp_path, WIDE.make_model)
    with torch.no_grad():
        prepared, converted, fp32 = rig.forward(BATCH), *(WIDE.call(model, BATCH.inputs) for model in (loaded, plain))
    assert (prepared - converted).abs().max() <= 1e-6
    assert (prepared - fp32).abs().max() > 1e-4  # the rounding shows


@pytest.mark.parametrize("qat", ["int8", "int4"])
def test_it_takes_memory_while_training(qat: str) -> None:
    def peak_bytes(choice: str) -> int:
        rig = assemble(WIDE, knobs_of(qat=choice), CPU)
        step(rig, BATCH)
        with ledger(rig.model, rig.stepper, BATCH.tensors()) as peak:
            step(rig, BATCH)
        return peak.peak_bytes

    assert peak_bytes(qat) > peak_bytes("none")


def test_without_plain_products() -> None:
    """What adds to a layer's weight, or multiplies by it itself, would miss the rounding."""
    layer = trained("int4").model.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, nn.Linear)
    x = torch.randn(5, layer.in_features)
    assert (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max() > 1e-3
    with pytest.raises(Incompatible, match="adapter=lora needs that layers multiply by their weights as they are"):
        assemble(WIDE, knobs_of(qat="int4", adapter="lora"), CPU)


def test_gradients_pass_the_rounding_unchanged_but_where_it_clips() -> None:
    layer = trained("int4").model.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, nn.Linear)
    x = torch.randn(5, layer.in_features)
    layer.weight.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    wanted = x.sum(0).expand_as(layer.weight)
    passed = torch.isclose(layer.weight.grad, wanted, rtol=1e-5, atol=1e-5)
    assert passed.float().mean() > 0.9
    assert not layer.weight.grad[~passed].any()


@pytest.mark.parametrize("group", [0, 3, -2])
def test_a_group_out_of_range_is_refused(group: int) -> None:
    with pytest.raises(BadInput, match=r"^qat\.group=-?\d: must be an even number"):
        Int4(group)
