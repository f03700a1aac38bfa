"""Weights that a forward pass writes into, in whatever way."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.probes.writes import Written, WrittenWeights
from tests import restless
from tests.core.probes.structures import structure_of
from tests.restless import WIDTH, Mlp, Net


class InPlace(Mlp):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return x


class ThroughData(Mlp):
    def between(self, x: Tensor) -> Tensor:
        self.b.weight.data[0] = 0
        return x


class ThroughAView(Mlp):
    def between(self, x: Tensor) -> Tensor:
        self.b.weight.detach().view(-1)[:3].mul_(0.5)
        return x


class OtherData(Mlp):
    def between(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight.data * 0.9
        return x


class OtherParameter(Mlp):
    def between(self, x: Tensor) -> Tensor:
        self.b.weight = nn.Parameter(self.b.weight.detach() * 0.9)
        return x


class AsOut(Mlp):
    def between(self, x: Tensor) -> Tensor:
        torch.tanh(self.b.weight.detach(), out=self.b.weight.detach())
        return x


class Outside(Net):
    """Writes into its stem, which is in no block."""

    def forward(self, x: Tensor) -> Tensor:
        self.stem.weight.data.clamp_(-1, 1)
        return super().forward(x)


def found(model: Net) -> Written:
    return WrittenWeights().find(structure_of(model, torch.randn(2, WIDTH), list(model.blocks)))


@pytest.mark.parametrize("block", [InPlace, ThroughData, ThroughAView, OtherData, OtherParameter, AsOut])
def test_a_write_in_a_block(block: Callable[[], nn.Module]) -> None:
    model = Net(block)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert found(model) == ("blocks.0.b.weight", "blocks.0.b.weight")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_write_elsewhere() -> None:
    assert found(Outside(Mlp)) == ("stem.weight", None)
    looked_up = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    assert WrittenWeights().find(structure_of(looked_up, torch.arange(2))) == ("0.weight", None)


def shrink(layer: nn.Linear, *_: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)


def shrinking(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.weight.data.mul_(0.9)
    return nn.functional.linear(x, layer.weight, layer.bias)


GIVEN: list[Callable[[nn.Sequential], Any]] = [  # to modules of torch
    lambda block: block[0].register_forward_pre_hook(shrink),
    lambda block: block[0].register_forward_hook(shrink),
    lambda block: block.register_forward_pre_hook(lambda block, _: shrink(block[0])),  # pyright: ignore[reportArgumentType, reportIndexIssue]
    lambda block: setattr(block[0], "forward", MethodType(shrinking, block[0])),
]


def test_hooks_and_forward_passes_that_others_give_to_modules_of_torch() -> None:
    for give in GIVEN:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        assert WrittenWeights().find(structure_of(model, torch.randn(2, WIDTH), [*model])) == (None, None)
        give(model[1])  # pyright: ignore[reportArgumentType]
        written = WrittenWeights().find(structure_of(model, torch.randn(2, WIDTH), [*model]))
        assert written.anywhere == "1.0.weight"
        task = lowvram.task(model, torch.randn(2, WIDTH))
        with pytest.raises(Incompatible, match=r"stepping=zeroth_order needs that a forward pass .*1\.0\.weight"):
            lowvram.assemble(task, "stepping=zeroth_order", device="cpu")


def test_blocks_that_change_something_else_write_into_no_weight() -> None:
    for name, block in restless.BLOCKS.items():
        assert found(Net(block)) == (None, None), name


class Untriable(InPlace):
    def between(self, x: Tensor) -> Tensor:
        return super().between(x)[x.sum(-1).argsort().numpy()]


def test_a_model_that_cannot_be_tried_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert found(Net(Untriable)) == (None, None)
    said = capsys.readouterr().out
    assert said.count("can't be tried without memory, so that nobody knows") == 1


class Making(InPlace):
    """Makes a tensor on the default device."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) + torch.zeros(WIDTH)


def test_a_default_device_of_the_users_changes_no_trial() -> None:
    """After torch.set_default_device("cuda"); meta stands in for a card."""
    task = lowvram.task(Net(Making), torch.randn(4, WIDTH), blocks="Making")
    with torch.device("meta"):
        assert task.structure(task.make()).get(WrittenWeights()) == ("blocks.0.b.weight", "blocks.0.b.weight")
