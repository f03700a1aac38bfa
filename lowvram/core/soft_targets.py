"""What a teacher predicts for the targets of a part, and how far a student's predictions are from that.

Hinton et al., "Distilling the Knowledge in a Neural Network" (2015): both distributions are softened by a temperature
T, and their divergence is multiplied by T², so that its gradient keeps its size whatever T.

Shapes: s rows, each the predictions for one target, v classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

ROWS = 128  # whose probabilities, which are in fp32 or wider, exist at a time


class SoftTargets(ABC):
    """A teacher's predictions for the targets of a part, flattened to rows.

    The loss of a row is (1 - alpha) · cross-entropy + alpha · T² · KL(teacher ‖ student).
    """

    def __init__(self, alpha: float, temperature: float) -> None:
        self.alpha, self.temperature = alpha, temperature

    def loss(self, rows: slice, logits_sv: Tensor) -> tuple[Tensor, Tensor]:
        """alpha · T² · KL of each of the rows (s,), and its gradient by the student's logits (s, v): both in fp32, or
        wider if the logits are."""
        exact = torch.promote_types(logits_sv.dtype, torch.float32)
        log_p_sv = torch.log_softmax(logits_sv.to(exact).div(self.temperature), -1)
        divergences_s = self.divergence(rows, log_p_sv)
        gradient_sv = log_p_sv.mul_(self.alpha * self.temperature)
        return divergences_s * (self.alpha * self.temperature**2), gradient_sv

    @abstractmethod
    def divergence(self, rows: slice, log_p_sv: Tensor) -> Tensor:
        """KL(teacher ‖ student) of each of the rows (s,). Overwrites the student's log-probabilities at this
        temperature with the gradient by the logits that were divided by it."""
