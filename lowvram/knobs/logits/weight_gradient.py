"""The gradient of the last layer's weight: summed over chunks of targets, or computed once they have all passed.

Shapes: n targets, c targets of a chunk, t classes of a tile, d width of the hidden states, v classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from lowvram.core.rig import IGNORE
from lowvram.knobs.logits.tied import NUMEL_AT_A_TIME


class WeightGradient(ABC):
    """The gradient (v, d) of a weight, from chunks of targets."""

    @abstractmethod
    def add(self, gradient_cv: Tensor, hidden_cd: Tensor) -> None:
        """Take note of a chunk, given the gradients of its logits; rows that don't count have hidden states of zero."""

    @abstractmethod
    def result(self) -> Tensor:
        """The gradient, after the last chunk."""


@final
class SumOverChunks(WeightGradient):
    """Sums products, in fp32 or wider if there are several. `product_vd` is reused for each chunk: on a CPU, touching
    new memory takes as long as the product that is written to it."""

    def __init__(self, weight_vd: Tensor, sum_dtype: torch.dtype) -> None:
        self.sum_vd = weight_vd.new_zeros(weight_vd.shape, dtype=sum_dtype)
        self.product_vd = None if sum_dtype is weight_vd.dtype else torch.empty_like(weight_vd)

    def add(self, gradient_cv: Tensor, hidden_cd: Tensor) -> None:
        if self.product_vd is None:
            self.sum_vd.addmm_(gradient_cv.T, hidden_cd)
        else:
            self.sum_vd.add_(torch.mm(gradient_cv.T, hidden_cd, out=self.product_vd))

    def result(self) -> Tensor:
        return self.sum_vd


@final
class SecondPass(WeightGradient):
    """Computes the logits once more, of all targets for a tile of classes: each tile's rows of the gradient are one
    product, so there is nothing to sum.

    Args:
        buffer: memory for the logits of a tile, in the dtype of products; it sets how many classes a tile has.
        log_sums_n1: of the exponentials of all logits of a target; complete when the last chunk has passed.
        logit_scale: by which gradients of logits are multiplied, and `hidden_scale` hidden states.
    """

    def __init__(
        self,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        targets_n1: Tensor,
        buffer: Tensor,
        log_sums_n1: Tensor,
        logit_scale: float,
        hidden_scale: float,
    ) -> None:
        self.hidden_nd, self.weight_vd, self.bias_v = hidden_nd, weight_vd, bias_v
        self.targets_n1, self.buffer, self.log_sums_n1 = targets_n1, buffer.flatten(), log_sums_n1
        self.logit_scale, self.hidden_scale = logit_scale, hidden_scale

    def add(self, gradient_cv: Tensor, hidden_cd: Tensor) -> None:
        """Nothing: all is computed in `result`."""

    def result(self) -> Tensor:
        num_targets, num_classes = len(self.hidden_nd), len(self.weight_vd)
        gradient_vd = torch.empty_like(self.weight_vd)
        hidden_nd = self.hidden_nd.to(self.weight_vd.dtype)
        scaled_nd = hidden_nd if self.hidden_scale == 1.0 else hidden_nd * self.hidden_scale
        size = max(1, self.buffer.numel() // num_targets)
        for first in range(0, num_classes, size):
            classes = slice(first, first + size)
            probabilities_nt = self._gradient_of_logits(hidden_nd, classes)
            torch.mm(probabilities_nt.T, scaled_nd, out=gradient_vd[classes])
        return gradient_vd

    def _gradient_of_logits(self, hidden_nd: Tensor, classes: slice) -> Tensor:
        """Those of a tile (n, t), in the buffer: p - 1 at the target, else p, from probabilities in fp32 or wider; 0
        where nothing counts."""
        weight_td = self.weight_vd[classes]
        logits_nt = self.buffer[: len(hidden_nd) * len(weight_td)].view(len(hidden_nd), -1)
        if self.bias_v is None:
            torch.mm(hidden_nd, weight_td.T, out=logits_nt)
        else:
            torch.addmm(self.bias_v[classes], hidden_nd, weight_td.T, out=logits_nt)
        places_n1 = self.targets_n1 - classes.start
        is_here_n1 = (places_n1 >= 0) & (places_n1 < len(weight_td))
        places_n1 = places_n1.clamp(0, len(weight_td) - 1)
        num_rows = max(1, NUMEL_AT_A_TIME // len(weight_td))
        columns = (logits_nt, self.log_sums_n1, places_n1, is_here_n1, self.targets_n1 == IGNORE)
        for logits_st, log_sums_s1, places_s1, is_here_s1, is_ignored_s1 in zip(
            *(column.split(num_rows) for column in columns), strict=True
        ):
            exact_st = logits_st.to(log_sums_s1.dtype).sub_(log_sums_s1).exp_()
            exact_st.scatter_add_(1, places_s1, -is_here_s1.to(exact_st.dtype)).masked_fill_(is_ignored_s1, 0)
            logits_st.copy_(exact_st.mul_(self.logit_scale) if self.logit_scale != 1.0 else exact_st)
        return logits_nt
