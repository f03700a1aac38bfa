"""Weights that stay in host memory: copies of them on the device, and their gradients on the way back.

A device's copies run on the stream that computes. Nobody may write into such a weight while a copy of it may still be
running; steppers write only after they have its gradient, which `HostGradient.arrived` has waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowvram.core import host
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.shards import local

Leave = Callable[[Tensor | None], Tensor | None]  # hands a gradient to somebody else, or returns it


def on_device(source: Tensor, device: torch.device, kind: Kind = Kind.PARAMETERS) -> Tensor:
    """A copy on the device of a weight in host memory, or of a part of it."""
    copy = announce(torch.empty(source.shape, dtype=source.dtype, device=device), kind)
    host.traffic.to_device_bytes += source.nbytes
    return copy.copy_(source, non_blocking=True)


@final
class HostGradient:
    """The gradient of a weight in host memory. It arrives piece by piece."""

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        pin = device.type == "cuda" and local(weight).is_pinned()
        self.whole, self.device = host.empty_like(weight, pin), device

    def write(self, rows: slice, piece: Tensor) -> None:
        """Copy some rows from the device. Who called `backward` counts these bytes."""
        local(self.whole)[rows].copy_(piece, non_blocking=True)

    def arrived(self) -> Tensor:
        """The whole gradient, after all copies."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.whole


def visiting(weight: Tensor, device: torch.device, leave: Leave | None = None) -> Tensor:
    """The weight itself; if it stays in host memory, a copy on the device that is freed with what uses it, and whose
    gradient goes back to the host.

    Args:
        leave: may take the gradient, in host memory, instead of the weight.
    """
    copy: Any = Visit.apply(weight, device, leave) if host.holds(weight) else weight
    return copy


@final
class Visit(torch.autograd.Function):
    """A weight's copy on the device."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: torch.device, leave: Leave | None) -> Tensor:
        ctx.weight, ctx.leave = weight, leave
        return on_device(local(weight.detach()), device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        arriving = HostGradient(ctx.weight, gradient.device)
        arriving.write(slice(None), announce(gradient, Kind.GRADIENTS))
        whole: Tensor | None = arriving.arrived()
        return whole if ctx.leave is None else ctx.leave(whole), None, None
