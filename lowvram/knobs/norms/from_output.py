"""The forward and backward pass of norms that keep their output.

`n` is the normalised input, `y` the output: y = n * weight + bias. Places are numbered over all dimensions
that a norm is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class KeepingNorm(ABC):
    """The forward pass of a norm that keeps its output, once a step has begun."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm, self.plain = norm, norm.forward
        self.keep_input()

    @property
    @abstractmethod
    def weight(self) -> nn.Parameter | None: ...

    @property
    @abstractmethod
    def bias(self) -> nn.Parameter | None: ...

    @abstractmethod
    def from_output(self, input: Tensor) -> Tensor:
        """The output, from which the backward pass begins."""

    def keep_input(self) -> None:
        self.is_sound, self.places = False, None

    def keep_output(self, places: Tensor | None) -> None:
        """Keep the output, and the normalised input of these places (one dimension)."""
        self.is_sound, self.places = True, places

    def __call__(self, input: Tensor) -> Tensor:
        return self.from_output(input) if self.is_sound and torch.is_grad_enabled() else self.plain(input)


@final
class KeepingLayerNorm(KeepingNorm):
    """Of torch.nn.LayerNorm."""

    norm: nn.LayerNorm

    @property
    def weight(self) -> nn.Parameter | None:
        return self.norm.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.norm.bias

    def from_output(self, input: Tensor) -> Tensor:
        norm = self.norm
        shape = norm.normalized_shape
        return LayerNormFromOutput.apply(input, norm.weight, norm.bias, shape, norm.eps, self.places)  # pyright: ignore[reportReturnType]


@final
class KeepingRmsNorm(KeepingNorm):
    """Of a module that has a weight (one dimension) and nothing else that trains, and divides by the root of the mean
    square of the last dimension."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__(norm)
        self.eps = eps

    @property
    def weight(self) -> nn.Parameter:
        return self.norm.get_parameter("weight")

    @property
    def bias(self) -> None:
        return None

    def from_output(self, input: Tensor) -> Tensor:
        return RmsNormFromOutput.apply(input, self.weight, self.plain, self.eps, self.places)  # pyright: ignore[reportReturnType]


@final
class LayerNormFromOutput(torch.autograd.Function):
    """Saves the output and the reciprocal standard deviations."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        places: Tensor | None,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
        kept = None
        if places is not None:
            flat_mean, flat_rstd, flat = (each.flatten(-len(shape)) for each in (mean, rstd, input))
            kept = ((flat.index_select(-1, places) - flat_mean) * flat_rstd).to(y.dtype)
        ctx.save_for_backward(y, rstd, weight, bias, kept)
        ctx.shape, ctx.places = shape, places
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, rstd, weight, bias, kept = ctx.saved_tensors
        n = y.clone() if bias is None else y - bias
        if weight is not None:
            n.div_(weight)
        n = n.to(y.dtype)  # the weights may have more bits
        if kept is not None:
            n.flatten(-len(ctx.shape)).index_copy_(-1, ctx.places, kept)
        # PyTorch's formula, of an input that has mean 0 and standard deviation 1 already.
        of_input, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient,
            n,
            ctx.shape,
            torch.zeros_like(rstd),
            torch.ones_like(rstd),
            weight,
            bias,
            ctx.needs_input_grad[:3],
        )
        return None if of_input is None else of_input.mul_(rstd), of_weight, of_bias, None, None, None


@final
class RmsNormFromOutput(torch.autograd.Function):
    """Saves the output and the reciprocal root mean squares."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        plain: Callable[[Tensor], Tensor],
        eps: float,
        places: Tensor | None,
    ) -> Tensor:
        y = plain(input)  # without a graph, as autograd's functions run
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        rrms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        kept = None if places is None else (input.index_select(-1, places) * rrms).to(y.dtype)
        ctx.save_for_backward(y, rrms, weight, kept)
        ctx.places, ctx.input_dtype = places, input.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, rrms, weight, kept = ctx.saved_tensors
        n = y.to(rrms.dtype) / weight
        if kept is not None:
            n.index_copy_(-1, ctx.places, kept.to(n.dtype))
        of_weight = (gradient * n).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_input = None
        if ctx.needs_input_grad[0]:
            of_n = gradient * weight.to(n.dtype)
            along = (of_n * n).mean(-1, keepdim=True)
            of_input = n.mul_(along).neg_().add_(of_n).mul_(rrms).to(ctx.input_dtype)
        return of_input, of_weight, None, None, None
