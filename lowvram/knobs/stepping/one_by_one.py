"""Steppers with one optimizer per parameter, so that each parameter can be updated by itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from lowvram.core.rig import MakeOptimizer, Stepper
from lowvram.core.rounding import forget


class OneByOneStepper(Stepper):
    """The base of these steppers: their optimizers, and what is kept of them."""

    def __init__(self, parameters: list[nn.Parameter], make_optimizer: MakeOptimizer) -> None:
        self.optimizers = {parameter: make_optimizer([parameter]) for parameter in parameters}

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            forget(self.optimizers[parameter].state, parameter)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, its_state in zip(self.optimizers.values(), state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
