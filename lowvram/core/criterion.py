"""The user's own criterion. It must return the sum over the targets, as losses of the parts of a batch are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.errors import require

SAME = 1e-3  # relative difference up to which two losses count as equal


@final
class UserCriterion:
    """Calls a criterion and checks that it returns one number. The first call also checks that it isn't a mean.

    Args:
        criterion: outputs, targets -> the sum of the losses of all targets (0-dim).
        key, value: the dotted key and the value by which the user chose it, for messages.

    Raises:
        BadInput: when called, if the criterion returned something else, or a mean.
    """

    def __init__(self, criterion: Callable[[Any, Tensor], Any], key: str, value: object) -> None:
        self.criterion, self.key, self.value = criterion, key, value
        self._check_first: Callable[[Any, Tensor], None] = self._refuse_mean

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        loss = self.criterion(outputs, targets)
        is_sum = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        allowed = "one whose criterion returns one number as a tensor, the sum of the losses of all targets"
        require(is_sum, self.key, self.value, allowed)
        if not is_fake(loss):  # a plan has no values
            self._check_first(outputs, targets)
            self._check_first = no_check
        return loss

    def _refuse_mean(self, outputs: Any, targets: Tensor) -> None:
        """Raise BadInput if the loss of the first sample equals that of the same sample twice, as for a mean. Checks
        nothing if an output doesn't have the samples as its first dimension."""
        if any(isinstance(leaf, Tensor) and not starts_with_samples(leaf, targets) for leaf in tree_leaves(outputs)):
            return
        with torch.no_grad():
            once, twice = (
                float(self.criterion(tree_map(repeated(times), outputs), repeated(times)(targets))) for times in (1, 2)
            )
        allowed = (
            f"one whose criterion returns the sum of the losses, not their mean: for one sample it was {once:.4g}, for "
            f"the same sample twice {twice:.4g} (torch's losses take reduction='sum')"
        )
        require(not (once and abs(twice - once) <= SAME * abs(once)), self.key, self.value, allowed)


def no_check(outputs: Any, targets: Tensor) -> None:
    """Takes the place of `_refuse_mean` after the first call."""


def starts_with_samples(tensor: Tensor, targets: Tensor) -> bool:
    """Whether the first dimension of an output has the length of that of the targets."""
    return tensor.dim() > 0 and len(tensor) == len(targets)


def repeated(times: int) -> Callable[[Any], Any]:
    """A function that repeats the first sample of a tensor `times` times, and returns other values unchanged."""

    def repeat(value: Any) -> Any:
        return value.detach()[:1].repeat(times, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value

    return repeat
