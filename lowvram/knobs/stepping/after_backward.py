"""The plain way: the backward pass computes all gradients, then one update uses them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.rates import set_rates
from lowvram.core.rig import Rig, is_finite
from lowvram.core.rounding import forget
from lowvram.core.shards import total_norm
from lowvram.core.stepper import Stepper, Update
from lowvram.knobs.stepping.scaling import check_clip, factor, rescale


@dataclass(frozen=True)
class AfterBackward(Knob):
    """The plain way: the backward pass computes all gradients, then one update uses them."""

    clip: float | None = None

    stage = Stage.STEPPING
    decides_learning = True
    needs_always = frozenset({Fact.GRADS_AT_UPDATE})

    def __post_init__(self) -> None:
        check_clip(self.clip)

    def clips_at(self) -> float | None:
        return self.clip

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, stepper=AfterBackwardStepper(rig.updated, rig.make_optimizer(rig.updated), self.clip))


class AfterBackwardStepper(Stepper):
    """One optimizer over all gradients, clipped to a global norm. A gradient that isn't finite stops the update."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        self.parameters, self.optimizer, self.clip = parameters, optimizer, clip
        self.divisor: Tensor | float = 1.0

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.divisor = divisor

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Update:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = total_norm(gradients) / self.divisor
        applied = is_finite(norm)
        if applied:
            rescale(gradients, factor(norm, self.clip, self.divisor))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(norm, applied)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            forget(self.optimizer.state, parameter)

    def set_lr(self, lr: float) -> None:
        set_rates(self.optimizer, lr)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
