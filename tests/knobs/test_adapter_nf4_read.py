"""A model that computes with a layer's weight instead of calling the layer can't have that weight in 4 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible


class Reading(nn.Module):
    """As torchvision's Swin reads the weights of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.called(torch.tanh(F.linear(x, self.read.weight, self.read.bias)))


class ReadingUntried(Reading):
    """The same in a model that can't be tried without memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(x.detach().numpy().size > 0))


def task_of(block: type[nn.Module], x: Tensor) -> lowvram.ModuleTask:
    return lowvram.task(nn.Sequential(block(), block(), nn.Linear(64, 5)), x, blocks=block.__name__)


def test_a_weight_that_is_read_has_no_values() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(Incompatible, match=r"no effect on 0\.read: the model computes with 0\.read\.weight instead"):
        lowvram.assemble(task_of(Reading, x), "adapter=qlora", "cpu")
    rig = lowvram.assemble(task_of(ReadingUntried, x), "adapter=qlora", "cpu")
    with pytest.raises(Incompatible, match="computes with the weight of a layer instead of calling the layer"):
        lowvram.step(rig, lowvram.Part(x, torch.arange(3)))
