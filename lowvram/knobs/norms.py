"""norms: what layer norms keep for the backward pass: their input, or their output, which the next layer keeps anyway.

The normalised input is (output - bias) / weight. Rota Bulò et al., "In-Place Activated BatchNorm for Memory-Optimized
Training of DNNs" (2018); Andoorveedu et al., "Tempo: Accelerating Transformer-Based Model Training through Memory
Footprint Reduction" (2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_fake import is_fake
from lowvram.core.knob import Fact, Kind, Knob, Stage
from lowvram.core.layers import layer_norms
from lowvram.core.rig import Rig, Stepper, StepperAround

MOST_SHIFT = 16.0  # of a bias to its weight: the rounding of an output is multiplied by up to one more than that


@dataclass(frozen=True)
class KeepInput(Knob):
    """Layer norms keep their input, as PyTorch's do."""

    stage = Stage.NUMERICS

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class KeepOutput(Knob):
    """Layer norms keep their output and compute the normalised input from it. A norm of which that isn't possible
    without a loss, as a weight is too small beside its bias, keeps its input in that step."""

    stage = Stage.NUMERICS
    band = 2e-6
    saves = Kind.ACTIVATIONS

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.LAYER_NORMS, Fact.WHOLE_PARAMS, Fact.OWN_FORMAT, Fact.EVERY_OPERATOR})

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.COMPILED})

    def apply(self, rig: Rig) -> Rig:
        norms = [Rebuilding(norm) for norm in layer_norms(rig.model)]
        for each in norms:
            each.norm.forward = each
        return replace(rig, stepper=CheckingStepper(rig.stepper, norms))


@final
class CheckingStepper(StepperAround):
    """Looks before each step which norms may keep their output. The device is waited for once."""

    def __init__(self, inner: Stepper, norms: list[Rebuilding]) -> None:
        super().__init__(inner)
        self.norms = norms

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        shifts = torch.stack([each.largest_shift() for each in self.norms])
        if not is_fake(shifts):
            for each, shift in zip(self.norms, shifts.tolist(), strict=True):
                each.is_sound = shift <= MOST_SHIFT  # not if it is nan
        self.inner.begin(num_parts, divisor)


@final
class Rebuilding:
    """The forward pass of a layer norm that keeps its output."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.norm, self.plain, self.is_sound = norm, norm.forward, True

    @torch.no_grad()
    def largest_shift(self) -> Tensor:
        """The largest |bias / weight| (0-dim, fp32). Infinite or nan if a weight is zero."""
        weight, bias = self.norm.weight, self.norm.bias
        if weight is None:
            return torch.zeros((), device=None if bias is None else bias.device)
        return ((torch.zeros_like(weight) if bias is None else bias) / weight).abs().max().float()

    def __call__(self, input: Tensor) -> Tensor:
        if not (self.is_sound and torch.is_grad_enabled()):
            return self.plain(input)
        norm = self.norm
        return FromOutput.apply(input, norm.weight, norm.bias, norm.normalized_shape, norm.eps)  # pyright: ignore[reportReturnType]


@final
class FromOutput(torch.autograd.Function):
    """A layer norm that saves its output and the reciprocal standard deviations."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
    ) -> Tensor:
        output, _, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
        ctx.save_for_backward(output, rstd, weight, bias)
        ctx.shape = shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        output, rstd, weight, bias = ctx.saved_tensors
        normalised = output.clone() if bias is None else output - bias
        if weight is not None:
            normalised.div_(weight)
        # PyTorch's formula, of an input that has mean 0 and standard deviation 1 already.
        of_input, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient,
            normalised,
            ctx.shape,
            torch.zeros_like(rstd),
            torch.ones_like(rstd),
            weight,
            bias,
            ctx.needs_input_grad[:3],
        )
        return None if of_input is None else of_input.mul_(rstd), of_weight, of_bias, None, None
