"""Recomputation of a block: BatchNorm's statistics, and forward passes without a backward pass."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from lowvram.core.assemble import assemble
from lowvram.core.changes import StatisticsFrozen
from lowvram.knobs.ckpt.block import recompute
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
