"""The laws that every knob keeps, over every YAML in conf/. A new knob is in them for free.

Each is a function of any knob, an option or not: tests/test_new_option.py holds them over one that is added. That of
pairs, law 5, is in tests/test_laws_of_pairs.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from torch import nn

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import apply_stage, assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import WRITES, Exactness, Knob, Stage
from lowvram.core.layers import PackedWeight
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.tile import TiledBlocks, TiledTokens
from lowvram.models.resnet import NormKind
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    KNOBS,
    LARGER,
    MODELS,
    NEUTRAL,
    PROBLEMS,
    RESNET,
    InDouble,
    Trained,
    company,
    is_for,
    knobs_of,
    lacking_of,
    make_batch,
    missing_here,
    relative_error,
    saved_bytes,
    train,
)
from tests.planted import MeanOfMeans, Stock
from tests.tiers import first_of

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards")]

Pair = tuple[str, str]  # group, option
SIZES = [32, 32, 27]  # samples of each step: the last batch divides by nothing
FP64_BAND = 1e-12  # of sums in another order
CHANGED = 1e-2  # a knob that says that it changes the numbers changes them by this at least
HERE = [pair for pair in KNOBS if not missing_here(pair)]
CHOSEN = [pair for pair in HERE if NEUTRAL[pair[0]] != pair[1]]
EXACT = [pair for pair in CHOSEN if KNOBS[pair].exactness is Exactness.EXACT]
INEXACT = [pair for pair in CHOSEN if KNOBS[pair].exactness is not Exactness.EXACT]


def words(value: object) -> str | None:
    """How a case of a test is called."""
    match value:
        case frozenset():
            return "+".join("=".join(pair) for pair in sorted(value))
        case (str(group), str(option)):
            return f"{group}={option}"
        case Knob():
            return type(value).__name__
        case torch.dtype():
            return str(value)
    return None


# Law 1: EXACT knobs leave the numbers alone, the others stay in their band.


def error_of(group: str, choice: str | Knob, problem: str, dtype: torch.dtype, device: torch.device = CPU) -> float:
    """The largest relative difference between three steps with the choice and with the neutral option: of losses,
    gradients and buffers."""
    found, wanted = (three_steps(group, which, problem, dtype, device) for which in (choice, NEUTRAL[group]))
    losses = relative_error({"": torch.stack(found.losses)}, {"": torch.stack(wanted.losses)})
    buffers = relative_error(found.buffers, wanted.buffers)
    return max(losses, buffers, relative_error(found.gradients, wanted.gradients))


@cache
def three_steps(group: str, choice: str | Knob, problem: str, dtype: torch.dtype, device: torch.device) -> Trained:
    """Plain SGD, whose parameters don't blow up noise. An optimizer is another update by its nature: when it is what is
    tried, the weights stand still."""
    task = InDouble(PROBLEMS[problem]) if dtype is torch.float64 else PROBLEMS[problem]
    if group == "optimizer":
        return train(task, knobs_of(**{group: choice}), SIZES, device=device, lr=0.0)
    return train(task, knobs_of(optimizer="sgd", **{group: choice}), SIZES, device=device, lr=0.01)


def keeps_the_numbers(knob: Knob, error: float, problem: str, dtype: torch.dtype) -> bool:
    """Whether an error is what an EXACT knob may have; one with a caveat about the model must have more."""
    if knob.caveat(PROBLEMS[problem].make_model()):
        return error > CHANGED
    return error <= (FP64_BAND if knob.band and dtype is torch.float64 else knob.band)


def comparable(knob: Knob) -> list[str]:
    """Problems. Dropout in parts draws other masks from the same distribution: nothing to compare."""
    is_in_parts = knob.stage is Stage.BATCH or isinstance(knob, TiledBlocks | TiledTokens)
    problems = [problem for problem in PROBLEMS if not is_in_parts or "dropout" not in problem]
    return [problem for problem in problems if is_for(knob, problem)]


@pytest.mark.parametrize(
    ("pair", "problem"),
    [(pair, problem) for pair in HERE for problem in MODELS if not is_for(KNOBS[pair], problem)],
    ids=words,
)
def test_an_option_that_a_model_can_not_have_says_why(pair: Pair, problem: str) -> None:
    with pytest.raises(Incompatible) as refusal:
        assemble(PROBLEMS[problem], knobs_of(**dict([pair])), CPU)
    name, sentence = "=".join(pair), str(refusal.value)
    assert sentence.startswith(f"{name} needs that the ")
    assert ";" not in sentence


EXACT_CASES = [
    (pair, problem, dtype)
    for pair in EXACT
    for problem in comparable(KNOBS[pair])
    for dtype in (torch.float32, torch.float64)
]


def is_quick(problem: str, dtype: torch.dtype) -> bool:
    """Each problem in one of the two formats: fp64, which shows more, for the plain models, fp32 for their variants."""
    return (problem in MODELS) == (dtype is torch.float64)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pair", "problem", "dtype"),
    first_of(
        sorted(EXACT_CASES, key=lambda case: not is_quick(*case[1:])), sum(is_quick(*case[1:]) for case in EXACT_CASES)
    ),
    ids=words,
)
def test_an_exact_knob_keeps_losses_gradients_and_buffers(pair: Pair, problem: str, dtype: torch.dtype) -> None:
    error = error_of(*pair, problem, dtype)
    assert keeps_the_numbers(KNOBS[pair], error, problem, dtype), error


# A ReLU close to its kink turns rounding into a whole gradient, the more so the deeper the model: bf16 against fp64
# differs by 0.27 in a ResNet of 12 normalised blocks. That says nothing of a knob, so the bands are those of one block.
SHALLOW = {norm.name: Auto().pose(replace(RESNET, layers=[1], norm=norm), IMAGES) for norm in NormKind}
SMOOTH: dict[str, Problem] = {**{model: PROBLEMS[model] for model in MODELS if model != "resnet"}, **SHALLOW}


def has_what_it_needs(knob: Knob, problem: Problem) -> bool:
    """As `is_for`, of a problem that isn't one of `PROBLEMS`."""
    return not lacking_of(problem, knob)


def smooth_ones(pair: Pair) -> list[str]:
    return [name for name, problem in SMOOTH.items() if has_what_it_needs(KNOBS[pair], problem)]


def turned(names: list[str], by: int) -> list[str]:
    """One of those that are no model's usual shape first, another for each option."""
    shallow = [name for name in names if name in SHALLOW]
    first = shallow[by % len(shallow)] if shallow else None
    return sorted(names, key=lambda name: name in SHALLOW and name != first)


INEXACT_CASES = [
    case
    for number, pair in enumerate(INEXACT)
    for case in first_of([(pair, name) for name in turned(smooth_ones(pair), number)], 2)
]


@pytest.mark.sampled
@pytest.mark.parametrize(("pair", "problem"), INEXACT_CASES, ids=words)
def test_an_inexact_knob_stays_in_its_band(pair: Pair, problem: str) -> None:
    assert 0 < gradient_error(pair[0], KNOBS[pair], SMOOTH[problem]) <= KNOBS[pair].band


def gradient_error(group: str, knob: Knob, problem: Problem, device: torch.device = CPU) -> float:
    """Of one step, relative to fp64 at the same weights."""
    found = train(problem, knobs_of(**{group: knob}), [32], device=device)
    wanted = train(InDouble(problem), knobs_of(**{group: reference(group, knob)}), [32], device=device)
    return relative_error(found.gradients, wanted.gradients)


def reference(group: str, knob: Knob) -> str | Knob:
    """What a knob's gradients are held against. Adapters train other parameters by their nature, and what is frozen
    keeps its statistics: the same parameters beside weights of full width (tests/knobs/test_adapter.py compares with
    none)."""
    return knob.reference() or NEUTRAL[group]


@pytest.mark.parametrize(
    ("group", "planted", "problem"),
    [
        ("ckpt", Stock(), "resnet"),
        ("ckpt", Stock(preserve_rng_state=False), "transformer_dropout"),
        ("sharding", MeanOfMeans(), "transformer"),
        ("sharding", MeanOfMeans(), "resnet_group"),
    ],
    ids=words,
)
def test_the_law_catches_the_known_bugs(group: str, planted: Knob, problem: str) -> None:
    error = error_of(group, planted, problem, torch.float32)
    assert error > CHANGED
    assert not keeps_the_numbers(planted, error, problem, torch.float32)


# Law 2: a model's parameters and buffers keep their names. (A BUILD knob may add some. An adapter moves a layer's into
# its `base_layer`, and qlora keeps some packed, which are in no state; tests/knobs/test_adapter.py finds them all.)


def with_models(pairs: list[Pair]) -> list[tuple[Pair, str]]:
    """Each option with each of the models that can have it."""
    return [(pair, model) for pair in pairs for model in MODELS if is_for(KNOBS[pair], model)]


@pytest.mark.sampled
@pytest.mark.parametrize(("pair", "problem"), with_models(HERE), ids=words)
def test_existing_names_are_unchanged(pair: Pair, problem: str) -> None:
    assert keeps_the_names(pair[0], KNOBS[pair], problem)


def keeps_the_names(group: str, knob: Knob, problem: str) -> bool:
    plain = set(PROBLEMS[problem].make_model().state_dict())
    model = assemble(PROBLEMS[problem], knobs_of(**{group: knob}), CPU).model
    names = {name.replace(".base_layer.", ".") for name in model.state_dict()} | packed_names(model)
    return names >= plain and (names == plain or knob.stage is Stage.BUILD)


def packed_names(model: nn.Module) -> set[str]:
    """The names that packed weights would have as parameters."""
    packed = (name for name, module in model.named_modules() if isinstance(module, PackedWeight))
    return {f"{name.removesuffix('.base_layer')}.weight" for name in packed}


# Law 3: a knob writes only the fields of its stage. Every assembly holds it to that.


@pytest.mark.parametrize("its_stage", Stage)
def test_a_field_of_another_stage_is_refused(its_stage: Stage) -> None:
    class Planted(Knob):
        stage = its_stage

        def apply(self, rig: Rig) -> Rig:
            return replace(rig, **{name: object()})

    rig = assemble(PROBLEMS["transformer"], knobs_of(), CPU)
    for name in (field.name for field in fields(Rig)):
        if name in WRITES[its_stage]:
            assert apply_stage(its_stage, {"planted": Planted()}, rig) is not rig
        else:
            wanted = rf"planted wrote \['{name}'\], which its stage {its_stage.name} may not"
            with pytest.raises(TypeError, match=wanted):
                apply_stage(its_stage, {"planted": Planted()}, rig)


# Law 4: what a knob claims to save goes down.

SAVING = [pair for pair in HERE if KNOBS[pair].saves]


def takes_compiled(pair: Pair) -> bool:
    return Fact.COMPILED in KNOBS[pair].needs()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pair", "problem"), with_models([pair for pair in SAVING if not takes_compiled(pair)]), ids=words
)
def test_the_kind_that_a_knob_saves_goes_down(pair: Pair, problem: str) -> None:
    share = saved_share(pair[0], KNOBS[pair], problem)
    assert share > 0, (
        f"it saves none of the {KNOBS[pair].saves}, or LARGER[{problem!r}] can't show it (tests/laboratory.py)"
    )


def saved_share(group: str, knob: Knob, problem: str) -> float:
    """Of the largest moment of the kind of memory that a knob says it saves."""
    assert knob.saves is not None
    return 1 - measured(problem, group, knob).by_kind_max[knob.saves] / neutral(problem, group).by_kind_max[knob.saves]


@cache
def neutral(problem: str, group: str) -> Peak:
    return measured(problem, group, NEUTRAL[group])


def measured(problem: str, group: str, choice: str | Knob) -> Peak:
    """The ledger of a step that comes after the optimizer's state was born."""
    task = LARGER[problem]
    rig, batch = assemble(task, knobs_of(**{group: choice}), CPU), make_batch(task.spec, 32)
    assert step(rig, batch)[1].applied
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


@pytest.mark.parametrize(("pair", "problem"), with_models([pair for pair in SAVING if takes_compiled(pair)]), ids=words)
def test_what_a_knob_saves_in_a_compiled_model_goes_down(pair: Pair, problem: str) -> None:
    """No ledger can follow compiled code. What its forward pass keeps for the backward pass is counted instead."""
    assert KNOBS[pair].saves is Kind.ACTIVATIONS
    task, choice = PROBLEMS[problem], dict([pair])
    batch = make_batch(task.spec, 32)
    without, with_it = (saved_bytes(task, knobs_of(**company(**choice), **which), batch) for which in ({}, choice))
    assert with_it < without
