"""LARS and LAMB, for large batches: the step of a layer is in proportion to the size of its weights.

You et al., "Large Batch Training of Convolutional Networks" (LARS, 2017), and "Large Batch Optimization for Deep
Learning: Training BERT in 76 minutes" (LAMB, 2019). A layer is a weight of two dimensions or more. Biases and norms
take the plain step without weight decay, as in the authors' code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.kind import Kind
from lowvram.core.shards import local, whole_norms
from lowvram.knobs.optimizer.fp32_compute import (
    STEP,
    RoundingOptimizer,
    RoundingPolicy,
    Trained,
    compute_dtype,
    gradient_of,
    pieces,
)
from lowvram.knobs.optimizer.groups import AdamKnob, OptimizerKnob, check_rates, check_share, decayed
from lowvram.knobs.optimizer.state_formats import Piece

PIECE_ELEMENTS = 2**21  # of a parameter that are updated at a time: 8 MiB for each copy in fp32
MOMENTUM, FIRST, SECOND = "momentum_buffer", "exp_avg", "exp_avg_sq"  # torch's names of these states


@final
@dataclass(frozen=True)
class LARS(OptimizerKnob):
    """SGD with momentum, in which a layer's learning rate is `lr * trust * |w| / (|g| + weight_decay * |w|)`."""

    lr: float = 1.0
    momentum: float = 0.9
    trust: float = 0.01
    weight_decay: float = 0.0005

    saves = Kind.OPTIMIZER

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.lr, self.weight_decay)
        check_share("momentum", self.momentum)
        require(0 < self.trust < math.inf, "optimizer.trust", self.trust, "above 0")

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups, policy = decayed(parameters, self.weight_decay), policy or RoundingPolicy()
        return LARSOptimizer(groups, policy, lr=self.lr, momentum=self.momentum, trust=self.trust)


@final
@dataclass(frozen=True)
class LAMB(AdamKnob):
    """AdamW, in which the step u of a layer, weight decay included, is multiplied by `|w| / |u|`."""

    lr: float = 1e-2
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups, policy = decayed(parameters, self.weight_decay), policy or RoundingPolicy()
        return LAMBOptimizer(groups, policy, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps)


class TrustRatioOptimizer(RoundingOptimizer, ABC):
    """Goes over the parameters twice: first it measures the layers, over the shards of all ranks, with one collective
    for all of them; then it updates. No step is kept in between: it is computed twice."""

    def __init__(self, groups: list[dict[str, Any]], policy: RoundingPolicy, **fields: Any) -> None:
        super().__init__(groups, policy, **fields)
        self.ratios: dict[nn.Parameter, Tensor] = {}  # of the layers, in the running step

    def begin_step(self, trained: Sequence[Trained]) -> None:
        for parameter, group in trained:
            self.take_in(parameter, group)
        layers = [(parameter, group) for parameter, group in trained if parameter.ndim >= 2]
        if layers:
            of = [parameter for parameter, _ in layers]
            weights, steps = zip(*(self.norms(*layer) for layer in layers), strict=True)
            weights, steps = whole_norms([*weights, *steps], [*of, *of]).chunk(2)
            ratios = torch.where((weights > 0) & (steps > 0), self.ratio(weights, steps, layers[0][1]), 1)
            self.ratios = dict(zip(of, ratios.unbind(), strict=True))

    def norms(self, parameter: nn.Parameter, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Of this rank's shard of a weight, and of what its ratio compares it with."""
        weights, steps = [], []
        for piece in pieces(parameter, PIECE_ELEMENTS):
            weight = self.widened(self.weight_of(parameter, piece))
            weights.append(torch.linalg.vector_norm(weight))
            steps.append(torch.linalg.vector_norm(self.compared(parameter, piece, weight, group)))
        return joined(weights, parameter), joined(steps, parameter)

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        ratio = self.ratios.pop(parameter, None)
        for piece in pieces(parameter, PIECE_ELEMENTS):
            weight = self.weight_of(parameter, piece)
            wide = self.widened(weight)
            wide.sub_(self.change(parameter, piece, wide, ratio, group))
            self.write(weight, wide)

    @abstractmethod
    def take_in(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Take a parameter's gradient into its state, which is made in the first step."""

    @abstractmethod
    def compared(self, parameter: nn.Parameter, piece: Piece, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """A piece of what a layer's ratio compares the weight with."""

    @abstractmethod
    def ratio(self, weights: Tensor, steps: Tensor, group: dict[str, Any]) -> Tensor:
        """The trust ratios of layers (n,), given the norms of their weights and of what these are compared with. Where
        one of both is 0, it is 1, whatever this returns."""

    @abstractmethod
    def change(
        self, parameter: nn.Parameter, piece: Piece, weight: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> Tensor:
        """What is subtracted from a piece of a weight, given here in fp32. `ratio` is None for biases and norms."""


@final
class LARSOptimizer(TrustRatioOptimizer):
    """The momentum sums steps, learning rate included, as in the paper; torch's SGD sums gradients."""

    def take_in(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if group["momentum"] and MOMENTUM not in self.state[parameter]:
            self.state[parameter][MOMENTUM] = zeros(parameter)

    def compared(self, parameter: nn.Parameter, piece: Piece, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient_of(parameter, piece)

    def ratio(self, weights: Tensor, steps: Tensor, group: dict[str, Any]) -> Tensor:
        return group["trust"] * weights / (steps + group["weight_decay"] * weights)

    def change(
        self, parameter: nn.Parameter, piece: Piece, weight: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> Tensor:
        step = torch.add(gradient_of(parameter, piece), weight, alpha=group["weight_decay"])
        step.mul_(group["lr"] if ratio is None else ratio * group["lr"])
        if not group["momentum"]:
            return step
        return piece.of(self.state[parameter][MOMENTUM]).mul_(group["momentum"]).add_(step)


@final
class LAMBOptimizer(TrustRatioOptimizer):
    def take_in(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if STEP not in state:
            state |= {STEP: 0, FIRST: zeros(parameter), SECOND: zeros(parameter)}
        state[STEP] += 1
        for piece in pieces(parameter, PIECE_ELEMENTS):
            gradient = gradient_of(parameter, piece)
            piece.of(state[FIRST]).lerp_(gradient, 1 - beta1)
            piece.of(state[SECOND]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def compared(self, parameter: nn.Parameter, piece: Piece, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        size = (piece.of(state[SECOND]) / (1 - beta2 ** state[STEP])).sqrt_().add_(group["eps"])
        size.mul_(1 - beta1 ** state[STEP])
        return torch.div(piece.of(state[FIRST]), size, out=size).add_(weight, alpha=group["weight_decay"])

    def ratio(self, weights: Tensor, steps: Tensor, group: dict[str, Any]) -> Tensor:
        return weights / steps

    def change(
        self, parameter: nn.Parameter, piece: Piece, weight: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> Tensor:
        by = group["lr"] if ratio is None else ratio * group["lr"]
        return self.compared(parameter, piece, weight, group).mul_(by)


def zeros(parameter: nn.Parameter) -> Tensor:
    """A state of a parameter's shape and shards, in the dtype in which the parameter is updated."""
    return torch.zeros_like(parameter, dtype=compute_dtype(parameter), requires_grad=False)


def joined(norms: Sequence[Tensor], parameter: nn.Parameter) -> Tensor:
    """The norm of a tensor (0-dim), given those of its pieces. A rank may have none of a parameter."""
    if not norms:
        return torch.zeros((), dtype=compute_dtype(parameter), device=local(parameter).device)
    return torch.linalg.vector_norm(torch.stack(list(norms)))
