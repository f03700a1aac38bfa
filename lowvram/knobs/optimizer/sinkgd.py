"""SinkGD: a matrix keeps no state; its step is the gradient with all rows and all columns made equally large.

Scetbon et al., "Gradient Multi-Normalization for Stateless and Scalable LLM Training" (2025), arXiv 2502.06742.
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
from lowvram.knobs.optimizer.matrices import (
    LINEAR_AND_CONVOLUTIONS,
    MatrixKnob,
    PerParameterOptimizer,
    as_matrix,
    numbered,
)


@final
@dataclass(frozen=True)
class SinkGD(MatrixKnob):
    """Each number of a matrix's step has a root mean square of `lr * scale`."""

    scale: float = 0.2
    iterations: int = 5

    saves = Kind.OPTIMIZER
    rule = "sinkgd"
    layers = LINEAR_AND_CONVOLUTIONS
    needs_always = frozenset({Fact.WHOLE_UPDATES, Fact.EVERY_PARAMETER})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale > 0, "optimizer.scale", self.scale, "above 0")
        require(1 <= self.iterations < 100, "optimizer.iterations", self.iterations, "at least 1 and below 100")

    def of_matrices(self, matrices: Mapping[nn.Parameter, int]) -> Optimizer:
        return SinkGDOptimizer(
            numbered(matrices),
            lr=self.lr,
            weight_decay=self.weight_decay,
            scale=self.scale,
            iterations=self.iterations,
        )


@final
class SinkGDOptimizer(PerParameterOptimizer):
    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step = balanced(as_matrix(gradient.to(torch.promote_types(gradient.dtype, torch.float32))), group["iterations"])
        weight.sub_(step.view(gradient.shape), alpha=group["lr"] * group["scale"])


def balanced(matrix: Tensor, iterations: int) -> Tensor:
    """A copy whose rows and columns are scaled in turn, so that in the end each has a root mean square of 1; except
    rows and columns of zeros."""
    matrix = matrix.clone(memory_format=torch.contiguous_format)
    for _ in range(iterations):
        for dim in (1, 0):
            size = torch.linalg.vector_norm(matrix, dim=dim, keepdim=True) / math.sqrt(matrix.shape[dim])
            matrix.div_(torch.where(size > 0, size, 1))
    return matrix
