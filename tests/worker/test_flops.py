"""On paper and in earnest: the same peak, the same kinds, and arithmetic by the book."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.heaviest import fix_heaviest
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.ledger import Peak, ledger
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.resnet import ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from lowvram.worker.mfu import model_flops
from tests.laboratory import (
    CPU,
    KNOBS,
    NEUTRAL,
    PROBLEMS,
    WITH_DROPOUT,
    fitting,
    is_for,
    knobs_of,
    make_batch,
    missing_here,
    peak_as_planned,
)
from tests.tiers import first_of

BATCH_SIZE = 4
OF_EACH_CLASS = {type(knob): pair for pair, knob in KNOBS.items() if NEUTRAL[pair[0]] != pair[1]}
CHOICES: list[dict[str, str | Knob]] = [
    {},
    *({group: option} for group, option in OF_EACH_CLASS.values()),
    {"ckpt": "every1", "accum": "x2", "precision": "bf16", "optimizer": "sgd"},
    {"ckpt": "every2", "accum": "x2", "precision": "fp16"},
]


def measured(problem: Problem, choices: dict[str, str | Knob]) -> Peak:
    """The real ledger, of a step after the optimizer's state was born, with those parameters that take the most."""
    rig, batch = assemble(problem, knobs_of(**choices), CPU), make_batch(problem.spec, BATCH_SIZE)
    assert step(rig, batch)[1].applied
    fix_heaviest(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


def is_followed(pair: tuple[str, str]) -> bool:
    """Whether a ledger sees what an option does, here."""
    unseen = KNOBS[pair].stage in (Stage.PROCESS, Stage.COMPILE) or Fact.COMPILED in KNOBS[pair].needs()
    return not unseen and not missing_here(pair)


@pytest.mark.parametrize("problem", first_of(WITH_DROPOUT))
@pytest.mark.parametrize(
    "choices",
    CHOICES,
    ids=lambda choices: "-".join(f"{group}={choice}" for group, choice in choices.items()) or "plain",
)
def test_the_peak_on_paper_is_the_real_one(choices: dict[str, str | Knob], problem: str) -> None:
    """Knobs that this machine can't play, and those of the process, change no memory; compilation is left out."""
    knobs = knobs_of(**choices)
    if not all(is_for(knob, problem.removesuffix("_dropout")) for knob in knobs.values()):
        pytest.skip("the model can't have this option")
    task = PROBLEMS[fitting(problem, knobs)]
    real = measured(task, {group: o for group, o in choices.items() if is_followed((group, str(o)))})
    paper = peak_as_planned(task, knobs, BATCH_SIZE)
    assert paper.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.ACTIVATIONS, Kind.INPUTS):
        assert paper.by_kind[kind] == pytest.approx(real.by_kind[kind], rel=0.01, abs=4096), kind


def test_no_memory_is_asked_for() -> None:
    """Weights of 3 terabytes: no machine has them."""
    huge = Auto().pose(TransformerConfig(1, 2**18, 2, 8), DataSpec(Modality.TOKENS, 11, (8,)))
    peak = peak_as_planned(huge, knobs_of(), BATCH_SIZE)
    assert peak.by_kind_max[Kind.PARAMETERS] > 3e12
    assert peak.peak_bytes > 4 * 3e12


def test_nothing_is_left_fake_afterwards() -> None:
    peak_as_planned(PROBLEMS["resnet"], knobs_of(), BATCH_SIZE)
    assert type(torch.ones(1) + 1) is torch.Tensor
    assert measured(PROBLEMS["resnet"], {}).peak_bytes > 0


def transformer_flops(config: TransformerConfig, vocabulary: int, num_tokens: int) -> int:
    """Forward: 2 per weight of a product and token, and both products of attention; backward: twice as much."""
    weights = config.num_layers * 12 * config.width**2 + config.width * vocabulary
    attention = config.num_layers * 2 * 2 * num_tokens**2 * config.width
    return 3 * (2 * weights * num_tokens + attention)


def test_arithmetic_of_a_transformer_is_by_the_book() -> None:
    config = TransformerConfig(num_layers=3, width=32, num_heads=2, context=16)
    problem = Auto().pose(config, DataSpec(Modality.TOKENS, 50, (16,)))
    assert model_flops(problem, knobs_of()) == transformer_flops(config, 50, 16)


def test_arithmetic_of_a_resnet_is_by_the_book() -> None:
    """The stem's convolution needs no gradient of the images."""
    config = ResNetConfig(layers=[1], width=8, image_size=8)
    problem = Auto().pose(config, DataSpec(Modality.IMAGES, 5, (3, 8, 8)))
    stem, block, head = 2 * 4 * 4 * 9 * 3 * 8, 2 * 2 * 4 * 4 * 9 * 8 * 8, 2 * 8 * 5
    assert model_flops(problem, knobs_of()) == 2 * stem + 3 * (block + head)


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_what_is_computed_again_is_not_the_models_arithmetic(problem: str) -> None:
    plain = model_flops(PROBLEMS[problem], knobs_of())
    assert model_flops(PROBLEMS[problem], knobs_of(ckpt="every1", accum="x4", precision="bf16")) == plain > 0


def test_a_trace_reads_no_file_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peak_as_planned(PROBLEMS["transformer"], knobs_of(), BATCH_SIZE)
    assert not list(tmp_path.iterdir())
