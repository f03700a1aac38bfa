"""torch's own losses, as a sum and the number that it is to be divided by."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
ELEMENT_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {  # each a mean, if called with outputs and targets alone
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


@final
@dataclass(frozen=True)
class SumAndCount:
    """A loss whose mean over any samples is `total(outputs, targets) / count(targets)`, both 0-dim."""

    total: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor]


def sum_and_count(criterion: Any) -> SumAndCount | None:
    """One of torch's losses, a mean or a sum, as both; None: it is none of them."""
    makers = (make for function, make in FUNCTIONS.items() if function is criterion)  # a user's object may have no hash
    made: Any = next(makers, lambda: criterion)()
    if type(made) not in (*CLASS_LOSSES, *ELEMENT_LOSSES) or made.reduction == "none":
        return None
    total = copy(made)
    total.reduction = "sum"
    return SumAndCount(total, ClassCount(total) if isinstance(total, CLASS_LOSSES) else count_elements)


@final
class ClassCount:
    """What torch divides the sum of a class loss by: the number of targets that aren't ignored or, with weights for
    classes, the sum of their weights. For targets that are probabilities, the number of samples or pixels."""

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self.loss = loss

    def __call__(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return torch.tensor(targets.numel() // targets.shape[min(1, targets.dim() - 1)], device=targets.device)
        counted = targets != self.loss.ignore_index
        if self.loss.weight is None:
            return counted.sum()
        return self.loss.weight.to(targets.device)[targets.where(counted, 0)].where(counted, 0).sum()


def count_elements(targets: Tensor) -> Tensor:
    return torch.tensor(targets.numel(), device=targets.device)
