"""Optimizers as torch.optim has them. With fp32 weights and gradients, AdamW holds 16 bytes per parameter, SGD with
momentum 12, plain SGD and Adafactor 8.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
Adafactor: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.core.knob import Fact, Kind, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.shards import is_sharded
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, widened
from lowvram.knobs.optimizer.groups import check_adam, check_rates, decayed


class Moments(Enum):
    """In which format AdamW's moments wait for the next step. The names are what a user types."""

    fp32 = torch.float32
    bf16 = torch.bfloat16  # rounded stochastically: a mean that moves by less than a bit still moves


@dataclass(frozen=True)
class AdamW(Knob):
    """Two moments per parameter."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: Moments = Moments.fp32

    stage = Stage.OPTIMIZER
    searched = False

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)

    def reference(self) -> AdamW:
        return replace(self, moments=Moments.fp32)

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, landing=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], landing: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        inner = torch.optim.AdamW(decayed(parameters, self.weight_decay), self.lr, betas, self.eps, fused=True)
        return widened(inner, landing or RoundingPolicy(), self.moments.value, PIECE_ELEMENTS)


@dataclass(frozen=True)
class SGD(Knob):
    """Stochastic gradient descent, with one momentum per parameter or (momentum=0) no state at all."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    stage = Stage.OPTIMIZER
    saves = Kind.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "at least 0 (no state) and below 1")
        allowed = "false without momentum: raise optimizer.momentum above 0 to use it"
        require(not self.nesterov or self.momentum > 0, "optimizer.nesterov", self.nesterov, allowed)

    def reference(self) -> SGD:
        return self

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, landing=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], landing: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups = decayed(parameters, self.weight_decay)
        fused = not any(map(is_sharded, parameters))  # torch 2.13 fuses no SGD over shards
        inner = torch.optim.SGD(groups, self.lr, self.momentum, nesterov=self.nesterov, fused=fused)
        return widened(inner, landing or RoundingPolicy(), piece_elements=PIECE_ELEMENTS)


@dataclass(frozen=True)
class Adafactor(Knob):
    """The second moment of a matrix as the product of a row and a column: next to no state.

    A step moves a weight matrix by at most `lr` of its own size (root mean square).
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    max_update: float = 1.0
    weight_decay: float = 0.1

    stage = Stage.OPTIMIZER
    saves = Kind.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        require(self.beta2_decay <= 0, "optimizer.beta2_decay", self.beta2_decay, "at most 0")
        require(self.max_update >= 1, "optimizer.max_update", self.max_update, "at least 1")

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.WHOLE_PARAMS})

    def reference(self) -> Adafactor:
        return self

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, landing=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], landing: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups = decayed(parameters, self.weight_decay)
        inner = torch.optim.Adafactor(groups, self.lr, self.beta2_decay, d=self.max_update)
        return widened(inner, landing or RoundingPolicy())
