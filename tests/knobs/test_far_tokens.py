"""Tokens that meet outside of attention though they are far apart: each knob that computes few tokens at a time refuses
the model, whether its trial has all tokens of a sample or a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.probes import token_trial
from lowvram.core.probes.reach import may_reach_far
from lowvram.core.structure import Structure
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.sharding.find_own_tokens import FindOwnTokens
from lowvram.knobs.sharding.find_runs import FindRuns
from lowvram.knobs.sharding.find_splits import FindSplits
from lowvram.knobs.tile.causal import CausalBlocks
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto
from tests.hugging import tiny
from tests.laboratory import structure_of
from tests.tiers import first_of

WIDTH, FAR = 8, 24  # farther apart than the few tokens of a trial
FEW, MANY = 60, 300  # of a sample: a trial has all, or few


class Mixer(nn.Module):
    """Causal attention, a layer pair, and perhaps something that mixes tokens that are far apart."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.merge = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.far = nn.Conv1d(WIDTH, WIDTH, 2, padding=FAR, dilation=FAR)
        self.pointwise = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.way:
            x = x + MIXES[self.way](self, x)
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def before(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) - FAR


MIXES: dict[str, Callable[[Mixer, Tensor], Tensor]] = {
    "convolution": lambda block, x: block.far(x.mT)[..., : x.shape[1]].mT,
    "padding": lambda block, x: F.pad(x, (0, 0, FAR, -FAR)),
    "slice": lambda block, x: torch.cat([x.new_zeros(len(x), FAR, WIDTH), x[:, :-FAR]], 1)[:, : x.shape[1]],
    "narrow": lambda block, x: F.pad(x.narrow(1, 0, max(0, x.shape[1] - FAR)), (0, 0, min(FAR, x.shape[1]), 0)),
    "pooling": lambda block, x: F.avg_pool1d(x.mT, 2 * FAR + 1, 1, FAR).mT,
    "indexing": lambda block, x: x[:, before(x).clamp(min=0)] * (before(x) >= 0)[:, None],
    "selecting": lambda block, x: x.index_select(1, before(x).clamp(min=0)) * (before(x) >= 0)[:, None],
    "product": lambda block, x: torch.ones(x.shape[1], x.shape[1]).to(x).tril(-FAR) @ x,
    "rolling": lambda block, x: x.roll(FAR, 1) if x.shape[1] % FAR else x,
}
PROBES = {"tile=tokens": CausalBlocks(), "context": FindRuns(2), "sequence": FindOwnTokens(FindSplits(2))}


def known_of(way: str, number: int) -> Structure:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixer(way), Mixer(way), nn.Linear(WIDTH, 5))
    return structure_of(lowvram.task(model, torch.randn(2, number, WIDTH), blocks="Mixer"))


def trouble(known: Structure, knob: str) -> str | None:
    try:
        found = known.get(PROBES[knob])
    except Incompatible as error:
        return str(error)
    return getattr(found, "trouble", None)


@pytest.mark.parametrize("number", [FEW, MANY])
@pytest.mark.parametrize("way", MIXES)
@pytest.mark.parametrize("knob", PROBES)
def test_tokens_that_meet_far_apart_are_seen(knob: str, way: str, number: int) -> None:
    assert trouble(known_of(way, number), knob)


@pytest.mark.parametrize("number", [FEW, MANY])
@pytest.mark.parametrize("knob", PROBES)
def test_what_computes_each_token_alone_is_not_refused(knob: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "pointwise", lambda block, x: block.pointwise(x.mT).mT)
    assert trouble(known_of("", number), knob) is None
    assert trouble(known_of("pointwise", number), knob) is None


@pytest.mark.medium
@pytest.mark.parametrize("knob", ["tile=tokens", "context"])
@pytest.mark.parametrize(
    "kind", first_of(["llama", "gpt2", "gemma", "qwen3", "mistral", "opt", "olmo2", "gpt_neox"], 2)
)
def test_models_of_transformers_are_not_refused_for_their_size(
    kind: str, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose trial has a few tokens alone; they take differences of positions, and cut halves of features."""
    monkeypatch.setattr(token_trial, "MOST_NUMEL", 0)
    asked = list[str]()

    def noting(function: str, *shapes: Any) -> bool:
        asked.append(function)
        return may_reach_far(function, *shapes)

    monkeypatch.setattr(token_trial, "may_reach_far", noting)
    spec = DataSpec(Modality.TOKENS, 300, (60,), 300)
    assert trouble(structure_of(Auto().pose(HfConfig(tiny(kind)), spec)), knob) is None
    assert asked
