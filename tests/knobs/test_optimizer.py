"""optimizer: the choice of update, its groups of parameters and its ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lowvram.config import BadInput
from lowvram.knobs.optimizer import SGD, AdamW, decayed


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4,), (2, 3, 1, 1), ())]


def test_weights_decay_and_biases_do_not() -> None:
    weights = parameters()
    decay, keep = decayed(weights, 0.1)
    assert [id(p) for p in decay["params"]] == [id(weights[0]), id(weights[2])]
    assert [id(p) for p in keep["params"]] == [id(weights[1]), id(weights[3])]
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    assert len(decayed(weights[1:2], 0.1)) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AdamW(0.01, 0.8, 0.9, 1e-6, 0.2), lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.2)),
        (SGD(0.1, 0.0, False, 0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (SGD(0.1, 0.9, True, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01)),
    ],
    ids=["adamw", "sgd", "nesterov"],
)
def test_every_field_reaches_the_optimizer(ours: AdamW | SGD, theirs: Any) -> None:
    """Three updates of a weight are those of torch's plain implementation."""
    results = []
    for make in (ours.make, theirs):
        weight = parameters()[0]
        optimizer = make([weight])
        for step in range(3):
            weight.grad = torch.full_like(weight, 0.5 + step)
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdamW(lr=0.0), r"optimizer\.lr=0\.0: must be above 0"),
        (lambda: AdamW(lr=math.nan), r"optimizer\.lr=nan"),
        (lambda: AdamW(weight_decay=-1.0), r"optimizer\.weight_decay=-1\.0: must be at least 0"),
        (lambda: AdamW(beta1=1.0), r"optimizer\.beta1=1\.0: must be at least 0 and below 1"),
        (lambda: AdamW(beta2=-0.1), r"optimizer\.beta2=-0\.1"),
        (lambda: AdamW(eps=0.0), r"optimizer\.eps=0\.0: must be above 0"),
        (lambda: SGD(lr=-1.0), r"optimizer\.lr=-1\.0"),
        (lambda: SGD(weight_decay=math.nan), r"optimizer\.weight_decay=nan"),
        (lambda: SGD(momentum=1.0), r"optimizer\.momentum=1\.0"),
        (lambda: SGD(momentum=0.0, nesterov=True), r"optimizer\.nesterov=true: must be false without momentum"),
    ],
    ids=range(10),
)
def test_values_out_of_range_are_named(make: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make()
