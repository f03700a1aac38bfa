"""GaLore: AdamW in the few directions in which a matrix's gradient is largest, which are found anew now and then.

Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection" (2024), arXiv 2403.03507.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.knobs.optimizer.low_rank import STEP, adam, check_rank_share, lying, rank_of, unlying
from lowvram.knobs.optimizer.matrices import LINEAR_AND_CONVOLUTIONS, MatrixKnob, PerParameterOptimizer, numbered

BASIS = "basis"  # (rows, rank), orthonormal columns


@final
@dataclass(frozen=True)
class GaLore(MatrixKnob):
    """Matrices keep the projection, and Adam's moments of what it makes of the gradient. Steps are as large as AdamW's,
    so both share a learning rate."""

    scale: float = 1.0
    refresh_every: int = 200
    rank_share: float = 0.25

    saves = Kind.OPTIMIZER
    rule = "galore"
    layers = LINEAR_AND_CONVOLUTIONS
    needs_always = frozenset({Fact.WHOLE_UPDATES, Fact.EVERY_PARAMETER})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale > 0, "optimizer.scale", self.scale, "above 0")
        require(self.refresh_every >= 1, "optimizer.refresh_every", self.refresh_every, "at least 1 step")
        check_rank_share(self.rank_share)

    def of_matrices(self, matrices: Mapping[nn.Parameter, int]) -> Optimizer:
        return GaLoreOptimizer(
            numbered(matrices),
            **self.adam_fields(),
            scale=self.scale,
            refresh_every=self.refresh_every,
            rank_share=self.rank_share,
        )


@final
class GaLoreOptimizer(PerParameterOptimizer):
    """The update of a matrix G of m rows and at least as many columns is B adam(Bᵀ G), where the columns of B are the r
    directions in which G was largest when B was found."""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = lying(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        rows, rank = matrix.shape[0], rank_of(gradient, group["rank_share"])
        if state.get(STEP, 0) % group["refresh_every"] == 0:
            state[BASIS] = largest_directions(matrix, rank)
        step = state[BASIS] @ adam(state[BASIS].T @ matrix, state, group)
        size = group["lr"] * group["scale"] * math.sqrt(rows / rank)
        weight.sub_(unlying(step, gradient), alpha=size)


def largest_directions(matrix: Tensor, rank: int) -> Tensor:
    """(rows, rank): the first left singular vectors. As eigenvectors of the smaller product, which takes less memory
    than a singular value decomposition. Of a gradient that isn't finite they are any directions: its step is not to be
    used, and the decomposition would fail."""
    squares = (matrix @ matrix.T).nan_to_num_(0.0, 0.0, 0.0)
    return torch.linalg.eigh(squares).eigenvectors[:, -rank:].clone(memory_format=torch.contiguous_format)
