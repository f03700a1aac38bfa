"""What optimizers have in common: the knob, the fields of AdamW and their ranges, and parameter groups.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from lowvram.config.errors import require
from lowvram.core.copies import original
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy


def decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for weights of two or more dimensions, none for biases and norms."""
    decay = [parameter for parameter in parameters if original(parameter).ndim >= 2]
    keep = [parameter for parameter in parameters if original(parameter).ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": keep, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_rates(lr: float, weight_decay: float) -> None:
    require(lr > 0, "optimizer.lr", lr, "above 0")
    require(weight_decay >= 0, "optimizer.weight_decay", weight_decay, "at least 0")


def check_share(name: str, value: float) -> None:
    """Check the decay of a running average: a beta or a momentum."""
    require(0 <= value < 1, f"optimizer.{name}", value, "at least 0 and below 1")


def check_adam(beta1: float, beta2: float, eps: float) -> None:
    check_share("beta1", beta1)
    check_share("beta2", beta2)
    require(eps > 0, "optimizer.eps", eps, "above 0")


class OptimizerKnob(Knob, ABC):
    """An option of `optimizer`, made anew for each rig."""

    stage = Stage.OPTIMIZER
    decides_learning = True

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, policy=RoundingPolicy(rig.rounding)))

    @abstractmethod
    def make(self, parameters: list[nn.Parameter], *args: Any, **named: Any) -> Optimizer:
        """The optimizer of some of the model's parameters, or of copies that stand for them. `policy` says how it
        rounds."""


@dataclass(frozen=True)
class AdamKnob(OptimizerKnob, ABC):
    """The hyperparameters of AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)

    def adamw(self, parameters: list[nn.Parameter]) -> Optimizer:
        """torch's AdamW with these values."""
        groups, betas = decayed(parameters, self.weight_decay), (self.beta1, self.beta2)
        return AdamW(groups, self.lr, betas, self.eps, fused=True)
