"""A criterion of the user's own, which must return the sum over the targets: parts of a batch are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.errors import require

SAME = 1e-3  # relative: two losses that differ by less are equal


@final
class UserCriterion:
    """Calls a criterion, and checks what it returns. The first call also checks that it isn't a mean.

    Args:
        criterion: outputs, targets -> the sum of the losses of all targets (0-dim).
        key, value: what the user set to choose it, as messages name it.

    Raises:
        BadInput: it returned something else.
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
        """A mean is the same for a sample and for that sample twice."""
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
    """What takes the place of a check that is done."""


def starts_with_samples(tensor: Tensor, targets: Tensor) -> bool:
    """Whether the first dimension of an output counts samples."""
    return tensor.dim() > 0 and len(tensor) == len(targets)


def repeated(times: int) -> Callable[[Any], Any]:
    """A function that takes a tensor's first sample, so many times; other values stay."""

    def repeat(value: Any) -> Any:
        return value.detach()[:1].repeat(times, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value

    return repeat
