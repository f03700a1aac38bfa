"""APOLLO: a gradient, scaled channel by channel as AdamW would scale its projection onto a few random directions.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance" (2024), arXiv 2412.05270. Written from the paper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.knobs.optimizer.low_rank import STEP, adam, check_rank_share, lying, random_projection, rank_of
from lowvram.knobs.optimizer.matrices import (
    LINEAR_AND_CONVOLUTIONS,
    MatrixKnob,
    PerParameterOptimizer,
    as_matrix,
    numbered,
)

NORM = "update_norm"  # of the last update that wasn't zero


@dataclass(frozen=True)
class ApolloKnob(MatrixKnob, ABC):
    """Matrices keep Adam's moments of a random projection. Steps are as large as AdamW's on average, so both share a
    learning rate."""

    scale: float = 1.0
    redraw_every: int = 200
    max_growth: float = 1.01
    seed: int = 0

    saves = Kind.OPTIMIZER
    rule = "apollo"
    layers = LINEAR_AND_CONVOLUTIONS
    needs_always = frozenset({Fact.WHOLE_UPDATES, Fact.EVERY_PARAMETER})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale > 0, "optimizer.scale", self.scale, "above 0")
        require(self.redraw_every >= 1, "optimizer.redraw_every", self.redraw_every, "at least 1 step")
        require(self.max_growth > 1, "optimizer.max_growth", self.max_growth, "above 1")

    @abstractmethod
    def projection(self) -> Mapping[str, Any]:
        """The values of "rank_share" and "per_channel"."""

    def of_matrices(self, matrices: Mapping[nn.Parameter, int]) -> Optimizer:
        return ApolloOptimizer(
            numbered(matrices),
            **self.adam_fields(),
            scale=self.scale,
            redraw_every=self.redraw_every,
            max_growth=self.max_growth,
            seed=self.seed,
            **self.projection(),
        )


@final
@dataclass(frozen=True)
class Apollo(ApolloKnob):
    """One scale for each channel, from a projection onto a share of the matrix's smaller side."""

    rank_share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank_share(self.rank_share)

    def projection(self) -> Mapping[str, Any]:
        return {"rank_share": self.rank_share, "per_channel": True}


@final
@dataclass(frozen=True)
class ApolloMini(ApolloKnob):
    """One scale for a whole matrix, from a projection onto one direction."""

    def projection(self) -> Mapping[str, Any]:
        return {"rank_share": 0.0, "per_channel": False}


@final
class ApolloOptimizer(PerParameterOptimizer):
    """The update of a matrix G of m rows and at least as many columns: Adam's update of its projection R = P G of r
    rows, P having been drawn at random, says by how much each column of G is to be scaled."""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = lying(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        rows, rank = matrix.shape[0], rank_of(gradient, group["rank_share"])
        epoch = state.get(STEP, 0) // group["redraw_every"]
        seed = f"{group['seed']}:{group['number']}:{epoch}"
        projected = random_projection(rank, rows, seed, like=matrix) @ matrix
        wanted = adam(projected, state, group)
        scales = ratio(norms(wanted, group), norms(projected, group)).mul_(group["scale"] * math.sqrt(rows / rank))
        update_norm = (scales * torch.linalg.vector_norm(matrix, dim=0)).norm()
        scales.mul_(limit(update_norm, state, group["max_growth"]))
        weight.addcmul_(gradient, along(scales, gradient).to(weight.dtype), value=-group["lr"])


def norms(projected: Tensor, group: dict[str, Any]) -> Tensor:
    """(columns,) of each column; or (1,) of all."""
    if group["per_channel"]:
        return torch.linalg.vector_norm(projected, dim=0)
    return torch.linalg.vector_norm(projected).view(1)


def ratio(wanted: Tensor, present: Tensor) -> Tensor:
    """Their quotient; 0 where nothing is present, as there the gradient is 0 too."""
    return torch.where(present > 0, wanted / present, 0)


def limit(update_norm: Tensor, state: dict[str, Any], max_growth: float) -> Tensor:
    """The factor (0-dim, at most 1) by which an update is made smaller, so that its norm is at most `max_growth` times
    the last one's."""
    last = state.get(NORM, torch.full_like(update_norm, torch.inf))
    factor = (max_growth * last / update_norm).clamp(max=1).nan_to_num(1.0)
    state[NORM] = torch.where(update_norm > 0, factor * update_norm, last)
    return factor


def along(scales: Tensor, gradient: Tensor) -> Tensor:
    """The scales, shaped so that they multiply the gradient: (columns,) are those of `lying`."""
    rows, columns = as_matrix(gradient).shape
    if len(scales) == 1:
        return scales.view([1] * gradient.ndim)
    return scales.view(1, *gradient.shape[1:]) if rows <= columns else scales.view(-1, *[1] * (gradient.ndim - 1))
