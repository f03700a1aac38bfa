"""Keepers of saved tensors: what each is asked to keep, and that one hands on to the one around it."""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor, nn

from lowvram.core.rig import Part
from lowvram.core.saved import Copy, Keeper, Saved
from tests.laboratory import CPU

WIDTH = 32


@final
class Negative(Copy):
    """A storage as its negative, handed on."""

    def __init__(self, keeper: Keeper, storage: torch.UntypedStorage, flat: Tensor) -> None:
        self.source, self.negative = weakref.ref(storage), keeper.hand_on(-flat)

    def view(self, tensor: Tensor) -> Saved:
        return NegativeView(self, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@final
class NegativeView(Saved):
    def __init__(self, copy: Negative, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self.copy, self.where = copy, (size, stride, offset)

    def read(self) -> Tensor:
        return (-self.copy.negative.read()).as_strided(*self.where)


@final
class Negatives(Keeper):
    """Keeps the negatives of tensors of at least `min_bytes` and at most `max_bytes`."""

    def __init__(self, model: nn.Module, min_bytes: int, max_bytes: int = 2**20) -> None:
        super().__init__(model, CPU, min_bytes)
        self.max_bytes = max_bytes
        self.kept: list[float] = []  # the first number of each storage

    def is_apt(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self.max_bytes

    def copy(self, storage: torch.UntypedStorage, flat: Tensor) -> Copy:
        self.kept.append(flat[0].item())
        return Negative(self, storage, flat)


def gradients_with(*keepers: Negatives, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result of the model, and the gradient of its weight; the last keeper is the innermost."""
    model.zero_grad()
    part = Part(x, torch.zeros(len(x)))
    outer = keepers[0].active(part) if keepers else torch.enable_grad()
    inner = keepers[1].active(part) if len(keepers) > 1 else torch.enable_grad()
    with outer, inner:
        y = model(x).exp()
        total = y.square().sum() + y[0].clone().exp().sum()
    total.backward()
    (weight, *_) = model.parameters()
    assert weight.grad is not None
    return y.detach(), weight.grad


def test_what_an_inner_keeper_makes_and_what_it_leaves_is_handed_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(8, WIDTH)
    y, wanted = gradients_with(model=model, x=x)
    outer, inner = Negatives(model, 1), Negatives(model, 1024)
    found = gradients_with(outer, inner, model=model, x=x)[1]
    assert torch.equal(found, wanted)
    large, small = y[0, 0].item(), y[0].exp()[0].item()
    assert inner.kept == [large]
    assert outer.kept == [-large, small]


def test_one_that_is_not_apt_is_handed_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(8, WIDTH)
    outer, inner = Negatives(model, 1024), Negatives(model, 1, max_bytes=512)
    y, _ = gradients_with(outer, inner, model=model, x=x)
    assert inner.kept == [y[0].exp()[0].item()]
    assert outer.kept == [y[0, 0].item()]  # what the inner one has made is too small


def test_after_the_forward_pass_no_keeper_is_around_another() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(8, WIDTH)
    outer, inner = Negatives(model, 1), Negatives(model, 1)
    gradients_with(outer, inner, model=model, x=x)
    outer.kept.clear()
    gradients_with(inner, model=model, x=x)
    assert outer.kept == []


def test_a_copy_dies_with_its_graph() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(8, WIDTH)
    keeper = Negatives(model, 1)
    with keeper.active(Part(x, x)):
        y = model(x).exp()
    assert len(keeper._copies) == 1
    del y
    assert not keeper._copies
