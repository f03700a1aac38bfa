"""qat: which layers round their weights, that an export in as few bits has the same ones, and what it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.compress.formats.weights import FewBits, int4, int8, int8_dynamic
from lowvram.compress.qat import FakeQuantized, Int4, Int8, codes_of, rounded, scales_of
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble, skeleton
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, conflicts
from lowvram.core.ledger import ledger
from lowvram.core.quiet import quiet
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.loops.export.format import Trained
from lowvram.tasks import Auto
from tests.laboratory import CPU, PROBLEMS, TOKENS, TRANSFORMER, knobs_of, make_batch, named

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


def test_without_own_linears() -> None:
    """A part of a layer that rounds would round by other scales: those of the part."""
    layer = trained("int4").model.get_submodule("blocks.0.mlp.up")
    assert type(layer) is not nn.Linear
    found = conflicts(named(("sharding", "tensor"), ("qat", "int4")), {Fact.ONE_RANK: ""})
    assert found == [
        "sharding=tensor needs that linear layers are those that the model has made, and qat=int4 ends that"
    ]


def test_gradients_pass_the_rounding_unchanged() -> None:
    layer = trained("int4").model.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, nn.Linear)
    x = torch.randn(5, layer.in_features)
    layer.weight.grad = None
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand_as(layer.weight), rtol=1e-5, atol=1e-5)


ROUNDED = {"int8": (int8(), 127, None), "int8_dynamic": (int8_dynamic(), 127, None), "int4": (int4(16), 7, 16)}


def scaled_weight(seed: int) -> Tensor:
    """Rows of all sizes, also zeros; the largest value of a piece is as often positive as negative."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 48, generator=draw) * 10.0 ** torch.randint(-20, 5, (64, 1), generator=draw)
    weight[5] = 0
    return weight


@pytest.mark.parametrize(("written", "largest", "group"), ROUNDED.values(), ids=ROUNDED)
def test_a_file_has_the_rounded_weights_of_training_to_the_bit(
    written: FewBits, largest: int, group: int | None
) -> None:
    layer = nn.Linear(48, 64)
    layer.weight.data.copy_(scaled_weight(1127))
    wanted = rounded(layer.weight.detach(), largest, group)
    with quiet():
        written.quantize([layer], nn.Sequential(layer))
        found: Any = layer.weight
        assert torch.equal(found.dequantize(), wanted)


@pytest.mark.parametrize(("largest", "group"), [(127, None), (7, 16), (7, 2), (7, 48)])
def test_the_last_bit_of_a_largest_weight_decides_no_code(largest: int, group: int | None) -> None:
    pieces = scaled_weight(1128).view(-1, group or 48)
    places = pieces.abs().argmax(1, keepdim=True)
    ends = pieces.gather(1, places)
    for towards in (-math.inf, math.inf):
        pieces.scatter_(1, places, torch.nextafter(ends, torch.full_like(ends, towards)))
        weight = pieces.view(64, 48)
        codes = codes_of(weight, scales_of(weight, largest, group), largest).view_as(pieces)
        assert torch.equal(codes.gather(1, places), (largest * ends.sign()).to(torch.int8))
        assert torch.allclose(rounded(weight, largest, group).view_as(pieces).gather(1, places), ends, rtol=1e-6)


@pytest.mark.parametrize("group", [0, 3, -2])
def test_a_group_out_of_range_is_refused(group: int) -> None:
    with pytest.raises(BadInput, match=r"^qat\.group=-?\d: must be an even number"):
        Int4(group)
