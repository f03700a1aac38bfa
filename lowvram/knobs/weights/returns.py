"""Gradients on their way from the device to the weights in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import after_backward
from lowvram.core import host
from lowvram.core.hooks import run_hooks
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.links import Link


class Arriving(NamedTuple):
    """A gradient that is being copied to the host."""

    weight: nn.Parameter
    gradient: Tensor  # in host memory
    wait: Callable[[], None]
    turn: int  # see `Returns.next_turn`


@final
class Returns:
    """Hands each weight in host memory its gradient, as autograd does with weights on the device: it is added to the
    weight's `grad`, then the weight's hooks are called. All of a backward pass are there when it ends.

    What has just been computed is still on its way while the next block computes, and the host deals with what was
    computed before that.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.arriving: deque[Arriving] = deque()
        self.turn, self.is_awaited = 0, False

    def begin(self) -> None:
        """Forget what a backward pass has left that failed."""
        while self.arriving:
            self.arriving.popleft().wait()
        self.is_awaited = False

    @torch.no_grad()
    def take(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Begin to copy a gradient of the device."""
        if not self.is_awaited:
            after_backward(self.finish)
            self.is_awaited = True
        there = host.empty_like(weight, pin=weight.is_pinned())
        wait = self.link.fetch(there, announce(gradient, Kind.GRADIENTS))
        self.arriving.append(Arriving(weight, there, wait, self.turn))
        if not self.link.overlaps:
            self.settle_through(self.turn)

    def next_turn(self) -> None:
        """Called before the backward pass of each block."""
        self.turn += 1
        self.settle_through(self.turn - 2)

    def settle_through(self, turn: int) -> None:
        while self.arriving and self.arriving[0].turn <= turn:
            self.settle(self.arriving.popleft())

    @torch.no_grad()
    def settle(self, arriving: Arriving) -> None:
        arriving.wait()
        weight = arriving.weight
        if weight.grad is None:
            weight.grad = arriving.gradient
        else:
            with host.computing():
                weight.grad.add_(arriving.gradient)
        run_hooks(weight)

    def finish(self) -> None:
        """Called when the backward pass ends."""
        self.is_awaited = False
        self.settle_through(self.turn)
