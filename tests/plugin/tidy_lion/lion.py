"""optimizer=lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). One momentum per parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, with_fp32_compute


@dataclass(frozen=True)
class Lion(Knob):
    """The sign of a running average of gradients."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99

    group_name = "optimizer"
    stage = Stage.OPTIMIZER
    saves = Kind.OPTIMIZER

    def __post_init__(self) -> None:
        require(self.lr > 0, "optimizer.lr", self.lr, "above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "at least 0 and below 1")

    def reference(self) -> Lion:
        return self

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, policy=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy) -> torch.optim.Optimizer:
        return with_fp32_compute(Signs(parameters, self.lr, (self.beta1, self.beta2)), policy, None, PIECE_ELEMENTS)


class Signs(torch.optim.Optimizer):
    """The update in fp32."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, *group["betas"], lr=group["lr"])

    def update(self, parameter: nn.Parameter, gradient: torch.Tensor, beta1: float, beta2: float, lr: float) -> None:
        state: dict[str, Any] = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        parameter.sub_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=lr)
        momentum.lerp_(gradient, 1 - beta2)
