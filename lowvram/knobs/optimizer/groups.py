"""What optimizers have in common: the knob, the fields of AdamW and their ranges, and parameter groups.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from lowvram.config.errors import require
from lowvram.core.copies import original
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Knob, Stage
from lowvram.core.probes.layers_above import LAYER_ORDER
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.optimizer.rates import RateRules, check_decay, groups_of


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


@dataclass(frozen=True)
class OptimizerKnob(Knob, ABC):
    """An option of `optimizer`, made anew for each rig.

    Args:
        groups: by globs of names of parameters, the values in which these differ, as `GroupRates` has them.
        layer_decay: multiplies a parameter's learning rate once for each layer above it (`LayersAbove`).
    """

    groups: dict[str, Any] | None = field(default=None, kw_only=True)
    layer_decay: float | None = field(default=None, kw_only=True)

    stage = Stage.OPTIMIZER
    decides_learning = True

    def __post_init__(self) -> None:
        groups_of(self.groups)
        check_decay("optimizer.layer_decay", self.layer_decay)

    def needs(self) -> frozenset[Fact | ModelFact]:
        decays = [self.layer_decay, *(group.lr_decay for group in groups_of(self.groups).values())]
        return self.needs_always if decays.count(None) == len(decays) else self.needs_always | {BLOCKS, LAYER_ORDER}

    @property
    def has_rules(self) -> bool:
        """Whether some weights have rates of their own."""
        return self.groups is not None or self.layer_decay is not None

    def apply(self, rig: Rig) -> Rig:
        make = self.maker(rig)
        if self.has_rules:
            make = RateRules(groups_of(self.groups), self.layer_decay).around(make, rig, self.base_lr())
        return replace(rig, make_optimizer=make)

    def base_lr(self) -> float:
        """The learning rate that the schedule multiplies."""
        lr: Any = vars(self)["lr"]
        return lr

    def maker(self, rig: Rig) -> MakeOptimizer:
        """What makes the optimizer of some of the parameters of this rig."""
        return partial(self.make, policy=RoundingPolicy(rig.rounding))

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
        super().__post_init__()
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)

    def adamw(self, parameters: list[nn.Parameter]) -> Optimizer:
        """torch's AdamW with these values."""
        groups, betas = decayed(parameters, self.weight_decay), (self.beta1, self.beta2)
        return AdamW(groups, self.lr, betas, self.eps, fused=True)
