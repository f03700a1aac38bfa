"""optimizer: how a gradient becomes an update. With fp32 weights and gradients, AdamW holds 16 bytes per parameter,
SGD with momentum 12, plain SGD 8.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Both are torch.optim's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowvram.config import require
from lowvram.core.knob import Kind, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.shards import is_sharded


@dataclass(frozen=True)
class AdamW(Knob):
    """Two moments per parameter."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    stage = Stage.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name}",
                getattr(self, name),
                "at least 0 and below 1",
            )
        require(self.eps > 0, "optimizer.eps", self.eps, "above 0")

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=self.make)

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(decayed(parameters, self.weight_decay), self.lr, betas, self.eps, fused=True)


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

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=self.make)

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = decayed(parameters, self.weight_decay)
        fused = not any(map(is_sharded, parameters))  # torch 2.13 fuses no SGD over shards
        return torch.optim.SGD(groups, self.lr, self.momentum, nesterov=self.nesterov, fused=fused)


def check_rates(lr: float, weight_decay: float) -> None:
    require(lr > 0, "optimizer.lr", lr, "above 0")
    require(weight_decay >= 0, "optimizer.weight_decay", weight_decay, "at least 0")


def decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weights of two dimensions or more decay, biases and norms don't."""
    decay = [parameter for parameter in parameters if parameter.ndim >= 2]
    keep = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": keep, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
