"""What optimizers have in common that keep Adam's moments of a gradient's projection instead of the gradient's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowvram.config.errors import require
from lowvram.core.rounding import MOST_SEEDS, bits_at_random
from lowvram.core.seeds import seed_of
from lowvram.knobs.optimizer.matrices import as_matrix

STEP = "step"  # the count of a parameter's updates


def lying(gradient: Tensor) -> Tensor:
    """The gradient as a matrix with at most as many rows as columns (a view if it can be one)."""
    matrix = as_matrix(gradient)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def unlying(matrix: Tensor, like: Tensor) -> Tensor:
    """The inverse of `lying`: in the shape of the gradient."""
    rows, columns = as_matrix(like).shape
    return (matrix if rows <= columns else matrix.T).reshape(like.shape)


def check_rank_share(rank_share: float) -> None:
    require(0 < rank_share <= 1, "optimizer.rank_share", rank_share, "above 0 and at most 1")


def rank_of(gradient: Tensor, rank_share: float) -> int:
    """The rank of a projection, given its share of the matrix's smaller side."""
    return max(1, round(rank_share * min(as_matrix(gradient).shape)))


def adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's update of a projected gradient, before the learning rate. Its moments and their count of steps are in
    `state`, where they are made if there are none."""
    (beta1, beta2), step = group["betas"], state.get(STEP, 0) + 1
    if step == 1:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state[STEP] = step
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    size = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return torch.div(first, size, out=size).div_(1 - beta1**step)


def random_projection(rank: int, rows: int, seed: str, like: Tensor) -> Tensor:
    """(rank, rows): independent normal numbers of variance 1 / rank, on the device and in the dtype of `like`. They
    depend on the seed and their place alone, on every device."""
    bits = bits_at_random(rank * rows, seed_of(seed) % MOST_SEEDS, like.device) >> 1  # 23 bits: exact in fp32 with 0.5
    uniform = bits.to(like.dtype).add_(0.5).mul_(2.0**-22).sub_(1)  # between -1 and 1
    return uniform.erfinv_().mul_(math.sqrt(2 / rank)).view(rank, rows)
