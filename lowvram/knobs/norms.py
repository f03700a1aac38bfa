"""norms: what layer norms keep for the backward pass: their input, or their output, which the next layer keeps anyway.

The normalised input is (output - bias) / weight. Where that would multiply the rounding of the output, as the weight is
small beside the bias, the normalised input of these places is kept beside the output.

Rota Bulò et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs" (2018); Andoorveedu et al.,
"Tempo: Accelerating Transformer-Based Model Training through Memory Footprint Reduction" (2022).

Places: the elements that a norm is over, each with a weight and a bias of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_fake import is_fake
from lowvram.core.knob import Fact, Kind, Knob, Stage
from lowvram.core.layers import layer_norms
from lowvram.core.rig import Rig, Stepper, StepperAround

MOST_SHIFT = 4.0  # of a bias to its weight: the rounding of an output is multiplied by up to one more than that
MOST_KEPT = 0.5  # share of its places that a norm keeps beside its output; with more it keeps its input


@dataclass(frozen=True)
class KeepInput(Knob):
    """Layer norms keep their input, as PyTorch's do."""

    stage = Stage.NUMERICS

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class KeepOutput(Knob):
    """Layer norms keep their output and compute the normalised input from it."""

    stage = Stage.NUMERICS
    band = 2e-6
    saves = Kind.ACTIVATIONS

    def needs(self) -> frozenset[Fact]:
        return frozenset(
            {Fact.LAYER_NORMS, Fact.WHOLE_PARAMS, Fact.OWN_FORMAT, Fact.EVERY_OPERATOR, Fact.EXACT_ACTIVATIONS}
        )

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.COMPILED})

    def apply(self, rig: Rig) -> Rig:
        norms = [KeepingNorm(norm) for norm in layer_norms(rig.model)]
        for each in norms:
            each.norm.forward = each
        return replace(rig, stepper=CheckingStepper(rig.stepper, norms))


@final
class CheckingStepper(StepperAround):
    """Finds before each step where a norm's output doesn't tell its normalised input: weights change. It waits for the
    device once, as steps do anyway when they look whether the gradients are finite."""

    def __init__(self, inner: Stepper, norms: Sequence[KeepingNorm]) -> None:
        super().__init__(inner)
        self.norms = norms

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        for each in self.norms:
            each.keep_output(None)
        weighted = [each for each in self.norms if each.norm.weight is not None]
        if weighted:
            check(weighted)
        self.inner.begin(num_parts, divisor)


@torch.no_grad()
def check(norms: Sequence[KeepingNorm]) -> None:
    """Tell each norm which of its places to keep. All norms are looked at together: that takes few kernels."""
    shifts = shifts_of([each.norm for each in norms])
    widths = [each.norm.weight.numel() for each in norms]
    ends = torch.tensor([*accumulate(widths)]).sub_(1).to(shifts.device, non_blocking=True)
    num_unsound = shifts.le(MOST_SHIFT).logical_not_().cumsum(0)[ends]  # nan is unsound too
    if is_fake(num_unsound):
        return  # plans take the weights to be sound, as they are at the start
    before = 0
    for each, its_shifts, up_to in zip(norms, shifts.split(widths), num_unsound.tolist(), strict=True):
        count, before = up_to - before, up_to
        if count > MOST_KEPT * len(its_shifts):
            each.keep_input()
        elif count:
            each.keep_output(its_shifts.topk(count).indices)


def shifts_of(norms: Sequence[nn.LayerNorm]) -> Tensor:
    """|bias / weight| at all places of all norms (one dimension, at least fp32). Very large, infinite or nan where the
    weight is so small that numbers times the weight lose digits."""
    formats = [torch.finfo(norm.weight.dtype) for norm in norms]
    weights = torch.cat([norm.weight.flatten() for norm in norms])
    biases = torch.cat(
        [(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias).flatten() for norm in norms]
    )
    weights, biases = (each.to(torch.promote_types(each.dtype, torch.float32)).abs() for each in (weights, biases))
    return (biases + MOST_SHIFT * max(each.tiny / each.eps for each in formats)) / weights


@final
class KeepingNorm:
    """The forward pass of a layer norm that keeps its output, once a step has begun."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.norm, self.plain = norm, norm.forward
        self.keep_input()

    def keep_input(self) -> None:
        self.is_sound, self.places = False, None

    def keep_output(self, places: Tensor | None) -> None:
        """Keep the output, and the normalised input of these places (their numbers, one dimension)."""
        self.is_sound, self.places = True, places

    def __call__(self, input: Tensor) -> Tensor:
        if not (self.is_sound and torch.is_grad_enabled()):
            return self.plain(input)
        norm = self.norm
        shape = norm.normalized_shape
        return FromOutput.apply(input, norm.weight, norm.bias, shape, norm.eps, self.places)  # pyright: ignore[reportReturnType]


@final
class FromOutput(torch.autograd.Function):
    """A layer norm that saves its output and the reciprocal standard deviations."""

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
        output, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
        kept = None
        if places is not None:
            mean_, rstd_, inputs = (each.flatten(-len(shape)) for each in (mean, rstd, input))
            kept = ((inputs.index_select(-1, places) - mean_) * rstd_).to(output.dtype)
        ctx.save_for_backward(output, rstd, weight, bias, kept)
        ctx.shape, ctx.places = shape, places
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        output, rstd, weight, bias, kept = ctx.saved_tensors
        normalised = output.clone() if bias is None else output - bias
        if weight is not None:
            normalised.div_(weight)
        if kept is not None:
            normalised.flatten(-len(ctx.shape)).index_copy_(-1, ctx.places, kept)
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
        return None if of_input is None else of_input.mul_(rstd), of_weight, of_bias, None, None, None
