"""Where a model's code doesn't fit a knob, the step refuses it in one sentence with torch's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class InSingle(Net):
    """Multiplies by numbers in fp32 of its own."""

    def forward(self, x: Tensor) -> Any:
        return torch.cdist(super().forward(x), x)


class Forces(Net):
    """Returns derivatives by its inputs."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


def step(model: nn.Module, knobs: str) -> Tensor:
    inputs = torch.randn(3, WIDTH)
    task = lowvram.task(model, inputs, lambda outputs, targets: (outputs.sum(-1) - targets).square().sum())
    return lowvram.step(lowvram.assemble(task, knobs, "cpu"), lowvram.Part(inputs, torch.randn(3)))[0]


@pytest.mark.parametrize(
    ("model", "knobs", "sentence"),
    [
        (InSingle, "precision=bf16_pure", "computes with weights in bf16: choose precision=bf16, or fp32"),
        (Forces, "tile=blocks tile.samples=2", "gradients aren't differentiated again"),
        (Forces, "adapter=qlora", "gradients aren't differentiated again"),
    ],
)
def test_a_misfit_is_a_refusal(model: type[nn.Module], knobs: str, sentence: str) -> None:
    with pytest.raises(Incompatible, match=f"^{knobs.split()[0]} needs that .*{sentence}.* \\(torch: [^\n]+\\)$"):
        step(model(), knobs)


def test_other_errors_stay_what_they_are() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) @ x

    for knobs in ("", "precision=bf16"):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"):
            step(Broken(), knobs)
    assert step(Forces(), "ckpt=every1").isfinite()
