"""Layer norms and RMS norms keep their output, which the next layer keeps anyway, instead of their input.

The normalised input is (output - bias) / weight. Where that would multiply the rounding of the output, as the weight is
small beside the bias, the normalised input of these places is kept beside the output.

Rota Bulò et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs" (2018); Andoorveedu et al.,
"Tempo: Accelerating Transformer-Based Model Training through Memory Footprint Reduction" (2022).

Places: the elements that a norm is over, each with a weight and perhaps a bias of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.layers import layer_norms, rms_norms
from lowvram.core.misfits import ONCE
from lowvram.core.rig import Rig
from lowvram.core.stepper import Stepper, StepperAround
from lowvram.core.structure import unless
from lowvram.knobs.norms.from_output import KeepingLayerNorm, KeepingNorm, KeepingRmsNorm

MOST_SHIFT = 4.0  # of a bias to its weight: the rounding of an output is multiplied by up to one more than that
MOST_KEPT = 0.5  # share of its places that a norm keeps beside its output; with more it keeps its input


NORMS = ModelFact(
    "the model has layer norms or RMS norms",
    unless(lambda known: layer_norms(known.model) or rms_norms(known.model), "this model has none: leave norms=input"),
)


@dataclass(frozen=True)
class KeepInput(Neutral):
    """Norms keep what their code makes them keep: PyTorch's layer norms their input."""

    stage = Stage.NUMERICS


@dataclass(frozen=True)
class KeepOutput(Knob):
    """Norms keep their output and compute the normalised input from it."""

    stage = Stage.NUMERICS
    band = 2e-6
    misfits: ClassVar[Mapping[str, str]] = {
        **ONCE,
        "has been modified by an inplace operation": "nothing changes the output of a norm in place, as"
        " ReLU(inplace=True) behind one does: choose norms=input",
    }
    saves = Kind.ACTIVATIONS
    needs_always = frozenset({NORMS, Fact.WHOLE_PARAMS, Fact.OWN_FORMAT, Fact.EVERY_OPERATOR, Fact.EXACT_ACTIVATIONS})
    breaks_always = frozenset({Fact.COMPILED})

    def apply(self, rig: Rig) -> Rig:
        norms: list[KeepingNorm] = [
            *map(KeepingLayerNorm, layer_norms(rig.model)),
            *(KeepingRmsNorm(norm, eps) for norm, eps in rms_norms(rig.model).items()),
        ]
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
        check(self.norms)
        self.inner.begin(num_parts, divisor)


@torch.no_grad()
def check(norms: Sequence[KeepingNorm]) -> None:
    """Tell each norm what to keep. All are looked at together: that takes few kernels."""
    for each in norms:
        each.keep_output(None)
    weighted = [(each, weight, each.bias) for each in norms if (weight := each.weight) is not None]
    if not weighted:
        return
    shifts = shifts_of([weight for _, weight, _ in weighted], [bias for *_, bias in weighted])
    widths = [weight.numel() for _, weight, _ in weighted]
    ends = torch.tensor([*accumulate(widths)]).sub_(1).to(shifts.device, non_blocking=True)
    num_unsound = shifts.le(MOST_SHIFT).logical_not_().cumsum(0)[ends]  # nan is unsound too
    if is_fake(num_unsound):
        return  # plans take all weights to be sound, as they are at the start
    before = 0
    for (each, *_), its_shifts, up_to in zip(weighted, shifts.split(widths), num_unsound.tolist(), strict=True):
        count, before = up_to - before, up_to
        if count > MOST_KEPT * len(its_shifts):
            each.keep_input()
        elif count:
            each.keep_output(its_shifts.topk(count).indices)


def shifts_of(weights: Sequence[nn.Parameter], biases: Sequence[nn.Parameter | None]) -> Tensor:
    """|bias / weight| at all places of all norms (one dimension, at least fp32). Very large, infinite or nan where the
    weight is so small that numbers times the weight lose digits."""
    formats = [torch.finfo(weight.dtype) for weight in weights]
    pairs = zip(weights, biases, strict=True)
    places_w = torch.cat([weight.flatten() for weight in weights])
    places_b = torch.cat([(torch.zeros_like(weight) if bias is None else bias).flatten() for weight, bias in pairs])
    size_w, size_b = (each.to(torch.promote_types(each.dtype, torch.float32)).abs() for each in (places_w, places_b))
    return (size_b + MOST_SHIFT * max(each.tiny / each.eps for each in formats)) / size_w
