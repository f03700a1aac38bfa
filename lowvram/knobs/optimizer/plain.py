"""torch.optim's optimizers. Weights, gradients and states in fp32 take 16 bytes per parameter with AdamW, 12 with SGD
with momentum, 8 with plain SGD.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.core.kind import Kind
from lowvram.core.shards import is_sharded
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import AdamKnob, OptimizerKnob, check_rates, decayed
from lowvram.knobs.optimizer.state_formats import InDtype, StateFormat

MOMENTUM = "momentum_buffer"  # in the states of torch.optim.SGD


MOMENTS = ("exp_avg", "exp_avg_sq")  # in those of torch.optim.AdamW


class Moments(Enum):
    """The dtype in which AdamW's moments are kept between steps. The names are what a user types."""

    fp32 = torch.float32
    bf16 = torch.bfloat16  # rounded stochastically, so that changes smaller than a bit aren't lost on average

    def formats(self) -> Mapping[str, StateFormat]:
        return {} if self is Moments.fp32 else dict.fromkeys(MOMENTS, InDtype(self.value))


@dataclass(frozen=True)
class AdamW(AdamKnob):
    """Two moments per parameter."""

    moments: Moments = Moments.fp32

    searched = False

    def reference(self) -> AdamW:
        return replace(self, moments=Moments.fp32)

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        return with_fp32_compute(
            self.adamw(parameters), policy or RoundingPolicy(), self.moments.formats(), PIECE_ELEMENTS
        )


@dataclass(frozen=True)
class SGD(OptimizerKnob):
    """Stochastic gradient descent, with one momentum per parameter or (momentum=0) no state at all."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    saves = Kind.OPTIMIZER
    formats: ClassVar[Mapping[str, StateFormat] | None] = None  # of states: how they are kept between steps

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.lr, self.weight_decay)
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "at least 0 (no state) and below 1")
        allowed = "false without momentum: raise optimizer.momentum above 0 to use it"
        require(not self.nesterov or self.momentum > 0, "optimizer.nesterov", self.nesterov, allowed)

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups = decayed(parameters, self.weight_decay)
        fused = not any(map(is_sharded, parameters))  # torch 2.13 has no fused SGD for DTensors
        inner = torch.optim.SGD(groups, self.lr, self.momentum, nesterov=self.nesterov, fused=fused)
        inner.register_step_pre_hook(begin_momenta)
        return with_fp32_compute(inner, policy or RoundingPolicy(), self.formats, PIECE_ELEMENTS)


def begin_momenta(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give parameters that begin to train after others a momentum of zero, from which the update is the same as from
    none: torch's fused SGD (2.13) fails where only some have one."""
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        has_momentum = [optimizer.state[parameter].get(MOMENTUM) is not None for parameter in trained]
        if any(has_momentum) and not all(has_momentum):
            for parameter, has in zip(trained, has_momentum, strict=True):
                if not has:
                    optimizer.state[parameter][MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
