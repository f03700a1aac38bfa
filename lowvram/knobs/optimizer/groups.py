"""Parameter groups, and range checks of the fields that optimizers have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowvram.config.errors import require
from lowvram.core.copies import original


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
