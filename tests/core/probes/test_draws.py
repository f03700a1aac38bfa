"""Who draws, found by trial: in which module, from which generator."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowvram.core.generators import seed_all
from lowvram.core.probes.draws import FirstDraw
from tests import restless
from tests.core.probes.structures import structure_of
from tests.restless import DRAWING, WIDTH, Net

INPUTS = torch.zeros(2, WIDTH)


class Masked(nn.Module):
    """Attention without dropout, by the kernel that takes a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 1, 4, -1).clone().requires_grad_()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4))


STEADY = [Masked(), nn.Dropout(0.0), nn.MultiheadAttention(WIDTH, 2), nn.BatchNorm1d(WIDTH, momentum=None)]
WHO = {
    "FunctionalDropout": r"blocks\.0 \(FunctionalDropout\)",
    "RandomRelu": r"blocks\.0\.relu \(RReLU\)",
    "NumpyScale": "from numpy's generator",
    "PythonNormal": "from Python's generator",
    "OwnNumpy": "from numpy's generator",
    "SometimesDrops": r"blocks\.1 \(SometimesDrops\)",
}


@pytest.mark.parametrize("name", [name for name in DRAWING if name != "OwnGenerator"])
def test_whoever_draws_is_named(name: str) -> None:
    seed_all(0)
    made = [DRAWING[name]() for _ in range(4)]
    if name == "SometimesDrops":
        vars(made[1])["num_calls"] = 1
    told = FirstDraw().find(structure_of(Net(lambda: made.pop(0)), INPUTS))
    assert told is not None
    assert re.search(WHO.get(name, " does: turn that off"), told)


@pytest.mark.parametrize("module", STEADY, ids=lambda module: type(module).__name__)
def test_what_draws_nothing_may_be_used(module: nn.Module) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> object:
        return model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)

    assert FirstDraw().find(structure_of(module, INPUTS, call=call)) is None


def test_a_model_that_cannot_be_tried_is_told() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.nonzero()[:, 0]]

    told = FirstDraw().find(structure_of(Deciding(), INPUTS))
    assert str(told).startswith("this model can't be tried without memory (")


def test_the_trial_moves_no_generator() -> None:
    seed_all(0)
    wanted = restless.GLOBAL_RANDOM.bit_generator.state
    FirstDraw().find(structure_of(Net(restless.GlobalNumpy), INPUTS))
    assert restless.GLOBAL_RANDOM.bit_generator.state == wanted
