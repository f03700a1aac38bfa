"""torch's own losses, as a sum and the number that it is to be divided by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import BadInput, BadSample
from lowvram.config.texts import first_line

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


def check_shapes(outputs: Tensor, targets: Tensor, key: str, value: object) -> None:
    """Raises BadInput if torch's losses of classes can't be computed: classes have to be the second dimension of the
    outputs, (n, k, ...), and targets be (n, ...), or probabilities (n, k, ...).

    Args:
        key, value: of the loss, for the message.
    """
    out, aim = tuple(outputs.shape), tuple(targets.shape)
    if out == aim or (len(out) > 1 and (out[0], *out[2:]) == aim) or (len(out) == 1 and not aim):
        return
    if len(out) > 1 and out[:-1] == aim:
        allowed = (
            f"a loss for outputs {out} and targets {aim}, whose classes stand last, as those of language models:"
            " torch's wants them second; task=auto is this cross-entropy, or move them in a criterion of your own"
        )
    else:
        allowed = f"a loss for outputs {out} and targets {aim}: torch's wants a target for each row of outputs"
    raise BadInput(key, value, allowed)


@contextmanager
def labels_named(num_classes: int, ignored: int) -> Iterator[None]:
    """Turns torch's error for a label of no class, which a CPU finds, into one that says what labels may be."""
    try:
        yield
    except IndexError as error:
        raise BadSample(
            f"in a sample, {first_line(error).rstrip('.')}: {labels_allowed(num_classes, ignored)}"
        ) from None


def check_labels(targets: Tensor, num_classes: int, ignored: int) -> None:
    """Raises BadSample for the first sample of a batch with a label of no class; a card would only end the program."""
    if targets.is_floating_point():
        return
    is_outside = (targets != ignored) & ((targets < 0) | (targets >= num_classes))
    if places := is_outside.nonzero().tolist():
        label, index = int(targets[tuple(places[0])]), (places[0] or [0])[0]
        allowed = labels_allowed(num_classes, ignored)
        raise BadSample(f"sample {index} of the first batch has the label {label}: {allowed}")


def labels_allowed(num_classes: int, ignored: int) -> str:
    return (
        f"the model has outputs for {num_classes} classes, which start at 0, and {ignored} is ignored (the loss's"
        " ignore_index)"
    )


def num_classes(outputs: Tensor) -> int:
    """Of outputs as torch's losses of classes want them."""
    return outputs.shape[min(1, outputs.dim() - 1)]


def count_elements(targets: Tensor) -> Tensor:
    return torch.tensor(targets.numel(), device=targets.device)
