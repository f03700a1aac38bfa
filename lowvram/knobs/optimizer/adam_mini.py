"""Adam-mini: AdamW with one second moment for all weights into a neuron.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024), arXiv 2406.16793.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.core.copies import original
from lowvram.core.kind import Kind
from lowvram.core.layers import is_transposed
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import AdamKnob, decayed
from lowvram.knobs.optimizer.matrices import PerParameterOptimizer


@final
@dataclass(frozen=True)
class AdamMini(AdamKnob):
    """One first moment per parameter; one second moment per output of a linear layer or a convolution, and per token of
    an embedding. The paper has one for all outputs of a head in queries and keys."""

    saves = Kind.OPTIMIZER

    def maker(self, rig: Rig) -> MakeOptimizer:
        modules: list[Any] = list(rig.model.modules())
        transposed = WeakIdKeyDictionary({module.weight: None for module in modules if is_transposed(module)})
        return partial(self.make, policy=RoundingPolicy(rig.rounding), transposed=transposed)

    def make(
        self,
        parameters: list[nn.Parameter],
        policy: RoundingPolicy | None = None,
        transposed: Collection[Tensor] = (),
    ) -> torch.optim.Optimizer:
        """Args: transposed: those of the model's weights that are (in, out)."""
        betas, groups = (self.beta1, self.beta2), decayed(parameters, self.weight_decay)
        groups = [
            {**group, "params": members, "outputs": dimension}
            for group in groups
            for dimension in (0, 1)
            if (members := [each for each in group["params"] if (original(each) in transposed) == dimension])
        ]
        inner = AdamMiniOptimizer(groups, lr=self.lr, betas=betas, eps=self.eps)
        return with_fp32_compute(inner, policy or RoundingPolicy())


@final
class AdamMiniOptimizer(PerParameterOptimizer):
    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        (beta1, beta2), step = group["betas"], state.get("step", 0) + 1
        squares = mean_squares(gradient, group["outputs"])
        if step == 1:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(squares)
        state["step"] = step
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(squares, 1 - beta2)
        size = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - beta1**step))


def mean_squares(gradient: Tensor, outputs: int) -> Tensor:
    """Of each output, with as many dimensions as the gradient; of a bias or a number, each its own.

    Args:
        outputs: the dimension that counts outputs.
    """
    if gradient.ndim < 2:
        return gradient.square()
    others = [dimension for dimension in range(gradient.ndim) if dimension != outputs]
    norms = torch.linalg.vector_norm(gradient, dim=others, keepdim=True)
    return norms.square() * (gradient.shape[outputs] / max(1, gradient.numel()))
