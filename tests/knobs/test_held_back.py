"""Gradients of weights that a backward pass leaves for later: which they are, and that they are the same."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lowvram.knobs.sharding.held_back import HeldBack, add_gradients, hold_back
from tests.laboratory import relative_error

WIDTH = 6
Gradients = dict[str, Tensor]


class Tied(nn.Module):
    """One weight in two places, an in-place function right behind a layer, and layers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 8), Conv1D(WIDTH, 8)
        self.image = nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False)
        self.mixed = nn.Linear(2 * 3 * 3, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + self.frozen(self.second(self.first(x).relu_()))
        images = (x[..., :, None] * x[..., None, :5]).unsqueeze(2).flatten(0, 1)
        return self.head(x + self.mixed(self.image(images).flatten(1)).unflatten(0, x.shape[:2]))


TOKENS = torch.arange(8).view(2, 4)
HELD = {"embedding.weight", "first.weight", "second.weight", "image.weight", "mixed.weight"}


def gradients(model: nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1129)
    return Tied().to(dtype)


def backward(model: nn.Module, device_format: torch.dtype | None = None) -> None:
    with torch.autocast("cpu", device_format or torch.bfloat16, enabled=device_format is not None):
        made = model(TOKENS)
    made.float().square().sum().backward() if device_format else made.square().sum().backward()


def test_what_is_held_back_are_products_of_weights() -> None:
    model, held = model_of(), HeldBack()
    wanted = deepcopy(model)
    backward(wanted)
    hold_back(model, held)
    with held.holding() as products:
        backward(model)
    whole, early = gradients(wanted), gradients(model)
    for name in whole.keys() - HELD:
        assert relative_error({name: early[name]}, {name: whole[name]}) < 1e-14
    assert early.keys() == whole.keys() - HELD | {"embedding.weight"}  # that of tokens that were looked up
    names = {id(each): name for name, each in model.named_parameters()}
    assert {names[id(product.weight)] for product in products} == HELD
    add_gradients(products)
    assert not products
    assert relative_error(gradients(model), whole) < 1e-14


def test_outside_of_it_nothing_is_held_back() -> None:
    model = model_of()
    wanted = deepcopy(model)
    backward(wanted)
    hold_back(model, HeldBack())
    backward(model)
    assert relative_error(gradients(model), gradients(wanted)) < 1e-14


def test_under_autocast_they_have_as_many_bits_as_without() -> None:
    model, held = model_of(torch.float32), HeldBack()
    wanted = deepcopy(model)
    backward(wanted, torch.bfloat16)
    hold_back(model, held)
    with held.holding() as products:
        backward(model, torch.bfloat16)
    add_gradients(products)
    found, whole = gradients(model), gradients(wanted)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in whole.items()}
    assert relative_error(found, whole) < 1e-2


def test_each_weight_gets_all_at_once() -> None:
    """Hooks, which may send a gradient, are called once, although the layers were called twice."""
    model, held, arrived = model_of(), HeldBack(), list[str]()
    hold_back(model, held)
    with held.holding() as products:
        backward(model)
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    add_gradients(products)
    assert sorted(arrived) == sorted(HELD)


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def changed(layer: Any) -> Any:
    layer.forward = lambda input: input * 2
    return layer


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "a class of somebody's": lambda: OwnForward(WIDTH, WIDTH),
    "a forward pass of its own": lambda: changed(nn.Linear(WIDTH, WIDTH)),
    "a weight with a hook": lambda: hooked(nn.Linear(WIDTH, WIDTH)),
    "a weight that is computed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "padding by other numbers than zeros": lambda: nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_other_layers_are_left_alone(what: str) -> None:
    model = nn.Sequential(LEFT_ALONE[what]())
    kind = type(model[0])
    hold_back(model, HeldBack())
    assert type(model[0]) is kind


def test_shapes_and_formats_that_do_not_fit_are_refused_as_ever() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    hold_back(model, HeldBack())
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, WIDTH + 1))
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, WIDTH, dtype=torch.float64))
    assert model(torch.zeros(WIDTH)).shape == (WIDTH,)
