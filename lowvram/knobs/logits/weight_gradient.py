"""The gradient of the last layer's weight: summed over chunks of targets, or computed once they have all passed.

Shapes: n targets, c targets of a chunk, t classes of a tile, d width of the hidden states, v classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from lowvram.knobs.logits.tile import Tile


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
            weight_td = self.weight_vd[first : first + size]
            bias_t = None if self.bias_v is None else self.bias_v[first : first + size]
            tile = Tile.of(hidden_nd, weight_td, bias_t, self.targets_n1, first, self.buffer)
            of_logits_nt = tile.gradient_of_logits(self.log_sums_n1, self.logit_scale)
            torch.mm(of_logits_nt.T, scaled_nd, out=gradient_vd[tile.classes])
        return gradient_vd
