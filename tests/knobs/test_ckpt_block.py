"""Recomputation of a block: BatchNorm's statistics, and forward passes without a backward pass."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.core.assemble import assemble
from lowvram.core.changes import StatisticsFrozen
from lowvram.core.knob import Knob
from lowvram.knobs.ckpt import KeepAll, RecomputeEvery, RecomputeSegments, Selective
from lowvram.knobs.ckpt.chosen import recompute
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    knobs_of,
    make_batch,
    relative_error,
)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_updated_once(momentum: float | None) -> None:
    def run(is_recomputed: bool) -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        x = torch.randn(8, 3, 6, 6, requires_grad=True)
        if is_recomputed:
            recompute(block)
        for _ in range(3):
            block(x).sum().backward()
        return block

    assert relative_error(dict(run(True).named_buffers()), dict(run(False).named_buffers())) == 0


def test_a_second_backward_pass_holds_them_too() -> None:
    norm = nn.BatchNorm1d(3)
    recompute(norm)
    loss = norm(torch.randn(4, 3, requires_grad=True)).square().sum()
    after_forward = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    loss.backward(retain_graph=True)
    loss.backward()
    assert relative_error(dict(norm.named_buffers()), after_forward) == 0


def test_an_exception_in_a_recomputation_leaves_momentum_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    with suppress(KeyError), StatisticsFrozen([norm]):
        assert norm.momentum == 0.0
        raise KeyError
    assert norm.momentum == 0.1


def test_evaluation_works_too() -> None:
    """Without gradients there is nothing to compute again."""
    rig, plain = (assemble(PROBLEMS["resnet"], knobs_of(ckpt=ckpt), CPU) for ckpt in ("every1", "none"))
    batch = make_batch(IMAGES, 4)
    rig.model.eval()
    plain.model.eval()
    with torch.no_grad():
        assert torch.equal(rig.forward(batch), plain.forward(batch))


class Gathering(nn.Module):
    """Takes the mean of all that came before: a list, to which the model adds what this block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.layer(torch.stack(features).mean(0)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gathering() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            features.append(block(features))
        return features[-1]


@pytest.mark.parametrize("knob", [RecomputeEvery(), Selective(), RecomputeSegments(2)], ids=str)
def test_a_list_that_grows_afterwards_is_the_one_of_the_forward_pass(knob: Knob) -> None:
    gradients = []
    for option in (KeepAll(), knob):
        torch.manual_seed(0)
        model, x = Dense(), torch.randn(3, 4)
        task = lowvram.task(model, x, lambda outputs, targets: (outputs - targets).square().sum(), blocks="Gathering")
        rig = lowvram.assemble(task, [option, "optimizer=sgd optimizer.lr=1.0 optimizer.momentum=0"], "cpu")
        lowvram.step(rig, lowvram.Part(x, torch.zeros(3, 4)))
        gradients.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
