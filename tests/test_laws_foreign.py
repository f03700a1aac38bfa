"""The laws of knobs on models that somebody else wrote: six families of transformers, each tiny."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.knob import Exactness, Stage
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto, Problem
from tests.hugging import CONFIGS, tiny
from tests.laboratory import (
    CPU,
    KNOBS,
    NEUTRAL,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    missing_here,
    relative_error,
    saved_bytes,
    train,
)
from tests.test_laws import Pair, reference, words
from tests.tiers import first_of

pytestmark = [
    pytest.mark.medium,
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards"),
    # It warns of in-place operations on what a block returns; T5's blocks return views, and nothing is done in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

SPECS = {
    Modality.TOKENS: DataSpec(Modality.TOKENS, 300, (8,)),
    Modality.LABELLED_TOKENS: DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300),
    Modality.IMAGES: DataSpec(Modality.IMAGES, 5, (3, 32, 32)),
}
SIZES = [4, 8]
ONE_KIND = "llama"  # the family that stands for all where each would take its time
FEW_KINDS = (ONE_KIND, "t5")  # those of scripts/test: a decoder alone, and blocks that are called with most
# All that can't be had, and why: the blocks of most families are called with more than tensors; a ResNet has no MLPs,
# and only batch norms.
REFUSED = {
    **{(("compile", "torchscript"), kind): "blocks take only tensors" for kind in CONFIGS if kind != "resnet"},
    (("tile", "mlp"), "resnet"): "the task knows the MLPs",
    (("tile", "blocks"), "resnet"): "each sample from that sample alone",  # BatchNorm
    (("tile", "blocks"), "t5"): "each sample from that sample alone",  # its blocks pass a bias that trains to the next
    **{(("tile", "tokens"), kind): "each sample from that sample alone" for kind in ("resnet", "t5")},
    **{(("tile", "tokens"), kind): "the blocks' causal attention alone" for kind in ("bert", "vit")},
    **{(("depth", "early_exit"), kind): "the head takes the output of an earlier block" for kind in CONFIGS},
    (("depth", "layer_drop"), "t5"): "inputs of several blocks can stand in",  # for the same reason
    (("depth", "stochastic"), "t5"): "what blocks add to their inputs",
    (("norms", "output"), "resnet"): "the model has layer norms or RMS norms",
    **{(("qat", "int4"), kind): "the model has linear layers besides the last" for kind in ("gpt2", "resnet")},
    (("qat", "int8"), "gpt2"): "besides the last, or convolutions of images",
}


@cache
def problem(kind: str) -> Problem:
    return posed(HfConfig(name=tiny(kind)))


def posed(model: HfConfig) -> Problem:
    return Auto().pose(model, SPECS[model.modality])


# Rounding turns a ReLU close to its kink into a whole gradient (see tests/test_laws.py): one block, and a smooth one.
# So does the pooling before it, where two pixels are alike: what lies before that is not compared.
SMOOTH = {
    "resnet": {"embedding_size": 16, "hidden_sizes": [16], "depths": [1], "hidden_act": "gelu", "layer_type": "basic"},
    "t5": {"dense_act_fn": "gelu"},
}


def smooth(kind: str) -> Problem:
    return posed(HfConfig(name=tiny(kind), args=SMOOTH.get(kind, {})))


def is_tried(pair: Pair, kind: str) -> bool:
    knob = KNOBS[pair]
    is_cheap = knob.stage is not Stage.COMPILE or kind == ONE_KIND or pair[1] == "torchscript"
    is_other = NEUTRAL[pair[0]] != pair[1] and not missing_here(pair)
    return is_other and is_cheap and pair != ("accum", "x16") and pair != ("accum", "x32")


def is_slow(case: tuple[Pair, str]) -> bool:
    """A graph takes seconds to compile; to an optimizer all families are alike, so that one stands for them."""
    (group, _), kind = case
    knob = KNOBS[case[0]]
    is_compiled = knob.stage is Stage.COMPILE or Fact.COMPILED in knob.needs()
    return is_compiled or kind not in FEW_KINDS or (group == "optimizer" and kind != ONE_KIND)


def quick_first(cases: list[tuple[Pair, str]]) -> list[Any]:
    return first_of(sorted(cases, key=is_slow), sum(not is_slow(case) for case in cases))


CASES = [(pair, kind) for pair in KNOBS for kind in CONFIGS if is_tried(pair, kind)]
EXACT = [case for case in CASES if case not in REFUSED and KNOBS[case[0]].exactness is Exactness.EXACT]
ONE_BLOCK = {(("depth", "layer_drop"), "resnet")}  # the smooth one has no block to spare
TRIED = [case for case in CASES if case not in REFUSED and case not in ONE_BLOCK]
INEXACT = [case for case in TRIED if KNOBS[case[0]].exactness is not Exactness.EXACT]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("pair", "kind"), sorted(REFUSED), ids=words)
def test_what_cannot_be_had_says_why(pair: Pair, kind: str) -> None:
    with pytest.raises(Incompatible, match=REFUSED[pair, kind]):
        assemble(problem(kind), knobs_of(**dict([pair])), CPU)


@cache
def steps(kind: str, pair: Pair) -> Trained:
    """Plain SGD; where an optimizer is what is tried, the weights stand still."""
    group, option = pair
    if group == "optimizer":
        return train(problem(kind), knobs_of(**{group: option}), SIZES, lr=0.0)
    return train(problem(kind), knobs_of(optimizer="sgd", **{group: option}), SIZES, lr=0.01)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("pair", "kind"), quick_first(EXACT), ids=words)
def test_an_exact_knob_keeps_losses_gradients_and_buffers(pair: Pair, kind: str) -> None:
    found, wanted = steps(kind, pair), steps(kind, (pair[0], NEUTRAL[pair[0]]))
    losses: list[dict[str, Tensor]] = [{"": torch.stack(trained.losses)} for trained in (found, wanted)]
    errors = [
        relative_error(*losses),
        relative_error(found.gradients, wanted.gradients),
        relative_error(found.buffers, wanted.buffers),
    ]
    if KNOBS[pair].caveat(problem(kind).make_model()):  # BatchNorm in parts
        assert max(errors) > 1e-3
    else:
        assert max(errors) <= KNOBS[pair].band


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("pair", "kind"), quick_first(INEXACT), ids=words)
def test_an_inexact_knob_stays_in_its_band(pair: Pair, kind: str) -> None:
    found = train(smooth(kind), knobs_of(**dict([pair])), [32])
    wanted = train(InDouble(smooth(kind)), knobs_of(**{pair[0]: reference(pair[0], KNOBS[pair])}), [32])
    gradients = [
        {name: each for name, each in trained.gradients.items() if "embedder" not in name}
        for trained in (found, wanted)
    ]
    assert 0 < relative_error(*gradients) <= KNOBS[pair].band


@pytest.mark.parametrize(
    "kind", first_of([*FEW_KINDS, *(kind for kind in CONFIGS if kind not in {*FEW_KINDS, "resnet"})], 2)
)
def test_recomputing_every_block_saves_two_fifths(kind: str) -> None:
    assert kept_by_every1(problem(kind)) <= 0.6


@pytest.mark.slow
def test_recomputing_every_block_of_a_resnet50_saves_three_fifths() -> None:
    """That of transformers, as its configuration is by default."""
    sizes = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
    assert kept_by_every1(posed(HfConfig(name=tiny("resnet"), args=sizes))) <= 0.4


def kept_by_every1(task: Problem) -> float:
    """The share of its activations that a forward pass still keeps."""
    batch = make_batch(task.spec, 2)
    kept = [saved_bytes(task, knobs_of(ckpt=option), batch) for option in ("none", "every1")]
    return kept[1] / kept[0]
