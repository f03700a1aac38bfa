"""Plans of models that somebody else wrote, beside the ledger of a real step on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.ledger import ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.models.external import ExternalConfig
from lowvram.models.hf import HfConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from scripts.benchmarks.plan_families_points import KINDS, write_family
from tests.hugging import tiny
from tests.laboratory import CPU, knobs_of, make_batch

FEW = ("llama", "bert", "mixtral", "convnext", "deit")  # of all: the others are slow, as they are many
SPECS = {
    Modality.TOKENS: DataSpec(Modality.TOKENS, 512, (64,)),
    Modality.LABELLED_TOKENS: DataSpec(Modality.LABELLED_TOKENS, 5, (64,), 512),
    Modality.IMAGES: DataSpec(Modality.IMAGES, 5, (3, 128, 128)),
}


def problem(kind: str, folder: Path) -> Problem:
    write_family(kind, folder)
    model = HfConfig(str(folder))
    return Auto().pose(model, SPECS[model.modality])


def real_bytes(task: Problem, batch: Part) -> int:
    """The peak of the second step, by which the optimizer's state is there."""
    rig = assemble(task, knobs_of(), CPU)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak.peak_bytes


def planned_bytes(task: Problem, num_samples: int) -> int:
    return trace(task, knobs_of(), num_samples, Target()).sums(is_steady=True).peak_bytes


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_plan_holds_what_a_real_step_holds(kind: str, tmp_path: Path) -> None:
    task = problem(kind, tmp_path)
    assert planned_bytes(task, 4) == pytest.approx(real_bytes(task, make_batch(task.spec, 4)), rel=0.005)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["bert:masked", "t5:pairs", "bart"])
def test_a_plan_of_texts_that_are_masked_or_written_holds_it_too(kind: str) -> None:
    model = HfConfig(tiny(kind))
    spec = DataSpec(Modality.MASKED_TOKENS, 300, (32,))
    if model.modality is Modality.PAIRS:
        spec = DataSpec(Modality.PAIRS, 300, (32,), layout=pairs_layout(32, 16))
    task = Auto().pose(model, spec)
    assert planned_bytes(task, 4) == pytest.approx(real_bytes(task, make_batch(spec, 4)), rel=0.005)


def test_a_recurrent_layer_keeps_what_a_real_one_keeps() -> None:
    """oneDNN's workspace."""
    model = ExternalConfig("tests.yours.Recurrent", {"vocab_size": "data.vocab_size"}, reads=Modality.TOKENS)
    task = Auto().pose(model, SPECS[Modality.TOKENS])
    assert planned_bytes(task, 8) == pytest.approx(real_bytes(task, make_batch(task.spec, 8)), rel=0.005)


@pytest.mark.slow
def test_rows_without_padding_are_planned_without_a_mask(tmp_path: Path) -> None:
    padded = problem("bert", tmp_path)
    whole = Auto().pose(padded.model, DataSpec(Modality.LABELLED_TOKENS, 5, (64,), 512, is_padded=False))
    batch = make_batch(whole.spec, 4)
    batch.inputs["attention_mask"] = torch.ones_like(batch.inputs["input_ids"])
    assert planned_bytes(whole, 4) == pytest.approx(real_bytes(whole, batch), rel=0.001)
    assert planned_bytes(whole, 4) < planned_bytes(padded, 4)
