"""The laws of knobs on rows of several sequences, and that such rows change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.ledger import ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.bucketed import trim_padding
from lowvram.data.loader import collate
from lowvram.data.packed import Packed
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.compile import CompiledBlocks
from lowvram.models.hf import HfConfig
from lowvram.models.transformer import Positions, TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    END,
    KNOBS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    as_packed,
    documents,
    knobs_of,
    lengths_like,
    make_batch,
    relative_error,
    saved_bytes,
    train,
)
from tests.test_laws import Pair, reference, words

pytestmark = pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards")

SIZES = [16, 16, 13]
SPEC = as_packed(documents([3, 4], TOKENS), TOKENS)
PROBLEMS: dict[str, Problem] = {
    "rotary": Auto().pose(TRANSFORMER, SPEC),
    "learned": Auto().pose(replace(TRANSFORMER, positions=Positions.learned), SPEC),
    "grouped": Auto().pose(replace(TRANSFORMER, num_kv_heads=1, positions=Positions.learned), SPEC),
}
EXACT: list[Pair] = [
    ("ckpt", "every1"),
    ("ckpt", "every2"),
    ("ckpt", "selective"),
    ("tile", "mlp"),
    ("tile", "blocks"),
    ("logits", "chunked"),
    ("logits", "tiled"),
    ("offload", "activations"),
    ("offload", "activations_disk"),
    ("accum", "x2"),
    ("accum", "x4"),
    ("accum", "x32"),
    ("stepping", "in_backward"),
    ("stepping", "cpu_offload"),
]
INEXACT: list[Pair] = [("precision", "bf16"), ("precision", "fp16"), ("precision", "bf16_pure"), ("adapter", "lora")]


def losses_of(task: Problem, batches: list[Part]) -> Tensor:
    """Of a step on each."""
    rig = assemble(task, knobs_of(optimizer="sgd"), CPU)
    rig.stepper.set_lr(0.01)
    return torch.stack([step(rig, batch)[0] for batch in batches])


HUGGING = {kind: Auto().pose(HfConfig(name=tiny(kind)), replace(SPEC, num_classes=300)) for kind in ("gpt2", "llama")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*PROBLEMS, *HUGGING])
def test_packing_keeps_the_loss(name: str) -> None:
    """Of three steps, each of 16 sequences, one a row or packed."""
    task = {**PROBLEMS, **HUGGING}[name]
    lengths = lengths_like(48, 8, torch.Generator().manual_seed(0))
    texts = documents([length + 1 for length in lengths], TOKENS)
    keys = [[(index, 0) for index in range(first, first + 16)] for first in (0, 16, 32)]
    padded, packed = ([make(texts, each) for each in keys] for make in (collate, Packed().collate))
    assert all(one.num_samples < other.num_samples / 1.5 for one, other in zip(packed, padded, strict=True))
    difference = losses_of(task, packed) - losses_of(task, padded)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_sequence_sees_another(name: str) -> None:
    """Another first sequence of a row changes none of the logits of the second."""
    task = PROBLEMS[name]
    model = assemble(task, knobs_of(), CPU).model
    tokens, places = torch.arange(8)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    changed = tokens.clone()
    changed[0, :3] = 9
    before, after = (task.call(model, {"input_ids": each, "position_ids": places}) for each in (tokens, changed))
    assert not torch.equal(before[:, :3], after[:, :3])
    assert torch.equal(before[:, 3:], after[:, 3:])
    alone = task.call(model, tokens[:, 3:])
    assert torch.allclose(before[:, 3:], alone, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("pair", EXACT, ids=words)
@pytest.mark.parametrize("name", ["rotary", "grouped"])
def test_an_exact_knob_keeps_losses_and_gradients(pair: Pair, name: str) -> None:
    task = PROBLEMS[name]
    found, wanted = (train(task, knobs_of(optimizer="sgd", **choice), SIZES, lr=0.01) for choice in (dict([pair]), {}))
    losses: list[dict[str, Tensor]] = [{"": torch.stack(trained.losses)} for trained in (found, wanted)]
    assert max(relative_error(*losses), relative_error(found.gradients, wanted.gradients)) <= KNOBS[pair].band


@pytest.mark.parametrize("pair", INEXACT, ids=words)
def test_an_inexact_knob_stays_in_its_band(pair: Pair) -> None:
    found = train(PROBLEMS["rotary"], knobs_of(**dict([pair])), [32])
    wanted = train(InDouble(PROBLEMS["rotary"]), knobs_of(**{pair[0]: reference(pair[0], KNOBS[pair])}), [32])
    assert 0 < relative_error(found.gradients, wanted.gradients) <= KNOBS[pair].band


def test_the_mask_is_kept_once_for_all_layers() -> None:
    """With more layers not more is kept than without it."""

    def growth(spec: DataSpec, batch: Part) -> int:
        model = replace(TRANSFORMER, positions=Positions.learned)
        kept = [
            saved_bytes(Auto().pose(replace(model, num_layers=layers), spec), knobs_of(), batch) for layers in (2, 3)
        ]
        return kept[1] - kept[0]

    batch = make_batch(SPEC, 16)
    assert growth(SPEC, batch) == growth(TOKENS, Part(batch.inputs["input_ids"], batch.targets))


@pytest.mark.parametrize("option", ["blocks", "model", "torchscript"])
def test_compiling_each_shape_is_refused(option: str) -> None:
    with pytest.raises(Incompatible, match=r"batches have one shape, or one of a few: .* compile\.dynamic=true"):
        assemble(PROBLEMS["rotary"], knobs_of(compile=option), CPU)


@pytest.mark.slow
@pytest.mark.skipif(bool(KNOBS["compile", "blocks"].needs() & Target().absent().keys()), reason="no C++ compiler")
def test_all_shapes_are_compiled_at_once() -> None:
    knob = CompiledBlocks(dynamic=True)
    found, wanted = (
        train(PROBLEMS["rotary"], knobs_of(optimizer="sgd", **choice), [16, 9, 13, 12], lr=0.01)
        for choice in ({"compile": knob}, {})
    )
    assert relative_error(found.gradients, wanted.gradients) <= knob.band


def test_a_plan_is_what_is_measured() -> None:
    """Of a batch whose rows have the data's whole length."""
    task, knobs = PROBLEMS["rotary"], knobs_of(ckpt="every1")
    batch = Part(*SPEC.example(6))
    rig = assemble(task, knobs, CPU)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        step(rig, batch)
    planned = trace(task, knobs, 6, Target()).sums(is_steady=True)
    assert planned.peak_bytes == peak.peak_bytes


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_cutting_keeps_the_loss_of_texts_with_a_class(kind: str) -> None:
    spec = DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300)
    batch = make_batch(spec, 6)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    mask[:, 5:], ids[:, 5:], ids[:, 4] = 0, 0, torch.where(mask[:, 4] == 1, END, 0)
    kept = trim_padding(batch, 1)
    assert kept.inputs["input_ids"].shape == (6, 5)
    task = Auto().pose(HfConfig(name=tiny(kind)), spec)
    assert torch.allclose(losses_of(task, [batch]), losses_of(task, [kept]), atol=1e-6)


def test_rows_may_be_longer_than_the_model_is_used_to() -> None:
    config = TransformerConfig(num_layers=1, width=16, num_heads=2, context=8, positions=Positions.learned)
    lengths = [8, 8, 2, 2]
    texts = documents([length + 1 for length in lengths], TOKENS)
    keys = [(index, 0) for index in range(4)]
    batch = Packed().collate(texts, keys)
    assert batch.targets.shape == (2, 10)
    task = Auto().pose(config, SPEC)
    assert torch.allclose(losses_of(task, [batch]), losses_of(task, [collate(texts, keys)]), atol=1e-6)
