"""What AdamW and the optimizers that descend from it are told.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.knobs.optimizer.groups import check_adam, check_rates


@dataclass(frozen=True)
class AdamKnob(Knob, ABC):
    """The hyperparameters of AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    stage = Stage.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)
