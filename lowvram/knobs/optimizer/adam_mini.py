"""Adam-mini: AdamW with one second moment for all weights into a neuron.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024), arXiv 2406.16793.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core.knob import Kind, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import check_adam, check_rates, decayed
from lowvram.knobs.optimizer.matrices import PerParameterOptimizer


@final
@dataclass(frozen=True)
class AdamMini(Knob):
    """One first moment per parameter; one second moment per row of a weight: of a linear layer or a convolution an
    output, of an embedding a token. The paper has one for all rows of a head in queries and keys."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    stage = Stage.OPTIMIZER
    saves = Kind.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)

    def reference(self) -> Knob:
        return self

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, policy=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups, betas = decayed(parameters, self.weight_decay), (self.beta1, self.beta2)
        inner = AdamMiniOptimizer(groups, lr=self.lr, betas=betas, eps=self.eps)
        return with_fp32_compute(inner, policy or RoundingPolicy())


@final
class AdamMiniOptimizer(PerParameterOptimizer):
    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        (beta1, beta2), step = group["betas"], state.get("step", 0) + 1
        squares = mean_squares(gradient)
        if step == 1:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(squares)
        state["step"] = step
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(squares, 1 - beta2)
        size = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - beta1**step))


def mean_squares(gradient: Tensor) -> Tensor:
    """Of each row, (rows, 1, …); of a bias or a number, each its own."""
    if gradient.ndim < 2:
        return gradient.square()
    norms = torch.linalg.vector_norm(gradient, dim=list(range(1, gradient.ndim)), keepdim=True)
    return norms.square() / gradient[0].numel()
