"""Options that put something in a layer's place, where the user has given the layer more to do than its class does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.compress.qat import rounded
from lowvram.config.errors import Incompatible
from lowvram.core.rig import Part
from tests.restless import CLASSES, WIDTH, Mlp, Net


class Hooked(Mlp):
    """Its layers have hooks, one of which counts calls in an attribute of the layer."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = self.a
        layer.calls = 0

        def count(layer: Any, given: Any, output: Tensor) -> Tensor:
            layer.calls += 1
            return 2 * torch.tanh(output / 2)

        self.a.register_forward_hook(count)
        self.b.register_forward_pre_hook(lambda layer, given: (given[0] * 1.5,))
        self.b.register_full_backward_hook(lambda layer, of_inputs, of_outputs: (of_inputs[0] * 0.5,))

    def between(self, x: Tensor) -> Tensor:
        layer: Any = self.a
        return x * (1 + layer.calls % 3)


class Listed(Mlp):
    """Calls its layers through a list, and by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.first = [self.a, torch.tanh, self.b], {"layer": self.a}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first["layer"](x)
        for each in self.steps[1:]:
            h = each(h)
        return x + h


class Twice(Mlp):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a


class Patched(Mlp):
    def __init__(self) -> None:
        super().__init__()
        old = self.a.forward
        self.a.forward = lambda input: old(input) * 0.5


def batch(number: int = 0) -> Part:
    torch.manual_seed(number)
    return Part(torch.randn(6, WIDTH), torch.randint(CLASSES, (6,)))


def made(block: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(7)
    return Net(block, 2)


def trained(model: nn.Module, knobs: str) -> tuple[Any, list[float]]:
    task = lowvram.task(model, batch().inputs)
    rig = lowvram.assemble(task, f"optimizer=sgd optimizer.lr=0.3 optimizer.momentum=0.0 {knobs}", "cpu")
    return rig, [lowvram.step(rig, batch(number))[0].item() for number in range(3)]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def by_hand(model: Net) -> list[float]:
    """The losses of a plain loop, with weights rounded in each step by hand."""
    layers = [model.stem, *{layer: None for block in model.blocks for layer in (block.a, block.b)}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for number in range(3):
        part = batch(number)
        with torch.no_grad():
            exact = [layer.weight.clone() for layer in layers]
            for layer in layers:
                layer.weight.copy_(rounded(layer.weight))
        loss = nn.functional.cross_entropy(model(part.inputs), part.targets)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for layer, weight in zip(layers, exact, strict=True):
                layer.weight.copy_(weight)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_layers_that_round_keep_their_hooks_and_everybody_who_holds_them_calls_them() -> None:
    for block in (Mlp, Hooked, Listed, Twice):
        plain: Any = made(block)
        model: Any = made(block)
        expected = by_hand(plain)
        _, losses = trained(model, "qat=int8")
        assert losses == pytest.approx(expected, rel=1e-5), block
        if block is Hooked:
            assert model.blocks[0].a.calls == plain.blocks[0].a.calls > 0


def test_adapters_keep_hooks_and_everybody_who_holds_a_layer_calls_it_with_its_adapter() -> None:
    """Then the plain model into which adapters are merged computes the same."""
    for knobs in ("adapter=lora", "adapter=qlora"):
        for block in (Mlp, Hooked, Listed, Twice):
            first = nn.functional.cross_entropy(made(block)(batch().inputs), batch().targets).item()
            model: Any = made(block)
            knob: Any = lowvram.knob(knobs)
            rig, losses = trained(model, knobs)
            assert knobs == "adapter=qlora" or losses[0] == pytest.approx(first, rel=1e-6), block
            assert losses[-1] != losses[0]
            plain: Any = knob.merged(model, lambda block=block: made(block).to("meta"))
            for each, other in zip(plain.blocks, model.blocks, strict=True):
                each.a.calls = getattr(other.a, "calls", 0)
            expected, x = plain(batch(5).inputs), batch(5).inputs
            for each, other in zip(plain.blocks, model.blocks, strict=True):
                other.a.calls = each.a.calls - 1 if block is Hooked else 0
            assert torch.allclose(rig.model(x), expected, rtol=1e-4, atol=1e-5), (knobs, block)


def test_a_layer_with_a_forward_of_its_own_is_refused_by_its_name() -> None:
    for knobs in ("qat=int8", "qat=int4 qat.group=2", "adapter=lora", "adapter=qlora"):
        with pytest.raises(Incompatible, match=r"would drop the forward pass that .* has put into blocks\.0\.a itself"):
            trained(made(Patched), knobs)


class OwnNorm(nn.BatchNorm1d):
    """Normalises by the first sample's share alone, and takes a second argument."""

    def forward(self, input: Tensor, shift: float = 0.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        normalised = nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.1, self.eps)
        return (normalised * 0.3 + shift).to(input.dtype)


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = OwnNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        old = self.other.forward
        self.other.forward = lambda input: old(input) * 0.3

    def between(self, x: Tensor) -> Tensor:
        return self.other(self.norm(x, 0.5))


class Noted(Mlp):
    """Its weight has hooks, an attribute, and stands in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = self.a.weight
        weight.share = 0.5
        weight.register_hook(lambda gradient: gradient * weight.share)
        self.weights, self.same = [self.b.weight], {"memory": self.b.weight.detach()[2:4]}

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x)) @ self.weights[0].t() * self.same["memory"].sum()


def test_in_bf16_norms_with_a_forward_of_their_own_keep_it_and_parameters_their_hooks() -> None:
    for block in (Normed, Noted):
        _, plain = trained(made(block), "")
        for knobs in ("precision=bf16_pure", "precision=bf16_split"):
            _, losses = trained(made(block), knobs)
            assert losses == pytest.approx(plain, rel=3e-2), (block, knobs)


def test_torchscript_records_the_forward_that_a_block_was_given() -> None:
    class Halved(Net):
        def __init__(self) -> None:
            super().__init__(Mlp, 2)
            for block in self.blocks:
                block.forward = halved(block.forward)

    def halved(old: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: old(x) * 0.5

    losses = []
    for knobs in ("", "compile=torchscript"):
        torch.manual_seed(7)
        losses.append(trained(Halved(), knobs)[1])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
