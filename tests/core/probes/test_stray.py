"""Weights that a model reads by other ways than through their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.probes.stray import StrayRead
from tests.core.probes.structures import structure_of
from tests.restless import WIDTH, Mlp, Net


class Listed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight]

    def between(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0])


class Detached(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.held = self.b.weight.detach()

    def between(self, x: Tensor) -> Tensor:
        return x @ self.held


class Closed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        weight = self.b.weight
        self.f = lambda x: x @ weight

    def between(self, x: Tensor) -> Tensor:
        return self.f(x)


class Own(Mlp):
    """Reads weights in its own forward pass, by their modules."""

    def between(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight.t()) * self.b.bias


class Fast(Net):
    def __init__(self) -> None:
        super().__init__(Mlp, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weights = {name: torch.full(weight.shape, 1 / WIDTH) for name, weight in block.named_parameters()}
            x = functional_call(block, weights, (x,))
        return self.head(x)


class Late(Net):
    def __init__(self) -> None:
        super().__init__(Mlp, 2)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return super().forward(x) * first.a.weight.detach().norm()


class Hooked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient * 0)


def found(model: Any) -> str | None:
    return StrayRead().find(structure_of(model, torch.randn(2, WIDTH), list(model.blocks)))


WAYS: dict[Callable[[], nn.Module], str] = {
    lambda: Net(Listed, 2): "the model reads blocks.0.a.weight through another attribute than its module's",
    lambda: Net(Detached, 2): "the model reads blocks.0.b.weight through another attribute than its module's",
    lambda: Net(Closed, 2): "the model reads blocks.0.b.weight through another attribute than its module's",
    Fast: "blocks.0.a is called with another weight in the place of blocks.0.a.weight",
    Late: "the model reads blocks.0.a.weight while blocks.0 doesn't compute",
    lambda: Net(Hooked, 2): "blocks.0.a.weight has a hook",
}


def test_each_way_is_found_and_weights_of_its_own_a_block_may_read() -> None:
    for make, clause in WAYS.items():
        assert str(found(make())).startswith(clause)
    assert found(Net(Own, 2)) is None
    norm = nn.utils.parametrizations.weight_norm
    model: Any = Net(Mlp, 2)
    for block in model.blocks:
        norm(block.a)
        nn.utils.spectral_norm(block.b)
    assert found(model) is None


def test_weights_in_host_memory_are_refused_there() -> None:
    x = torch.randn(4, WIDTH)
    for make, clause in WAYS.items():
        with pytest.raises(Incompatible, match=f"offload=parameters needs that each weight .*{clause}"):
            lowvram.assemble(lowvram.task(make(), x), "offload=parameters", "cpu")
