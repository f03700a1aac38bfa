"""The user's own criterion. It must return the sum over the targets, as losses of the parts of a batch are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import require
from lowvram.core.rig import IGNORE
from lowvram.core.torch_losses import count_elements, sum_and_count

SAME = 1e-3  # relative difference up to which two losses count as equal


@final
class UserCriterion:
    """Calls a criterion and checks that it returns one number. Means of torch's own losses are turned into sums; the
    first call checks that others aren't means.

    Args:
        criterion: outputs, targets -> the sum of the losses of all targets (0-dim), or one of torch's losses.
        key, value: the dotted key and the value by which the user chose it, for messages.

    Raises:
        BadInput: when called, if the criterion returned something else, or a mean.
    """

    def __init__(self, criterion: Callable[[Any, Any], Any], key: str, value: object) -> None:
        of_torch = sum_and_count(criterion)
        self.criterion, self.key, self.value = of_torch.total if of_torch else criterion, key, value
        self.count = of_torch.count if of_torch else None  # targets -> what the sum is to be divided by; None: unknown
        self._prepare: Callable[[Any, Any], None] = self._check_first

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        self._prepare(outputs, targets)
        loss = self.criterion(outputs, targets)
        is_sum = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        allowed = "one whose criterion returns one number as a tensor, the sum of the losses of all targets"
        require(is_sum, self.key, self.value, allowed)
        return loss

    def _check_first(self, outputs: Any, targets: Any) -> None:
        """Called before the first loss is computed from values; a plan has none."""
        leaves = tensors_of((outputs, targets))
        if any(is_fake(leaf) for leaf in leaves):
            return
        self._prepare = no_check
        if isinstance(self.criterion, nn.Module) and leaves:
            self.criterion.to(leaves[0].device)  # weights of classes, for example
        if self.count is None:
            self._refuse_mean(outputs, targets)
        elif self.count is count_elements:
            shapes = [tuple(leaf.shape) for leaf in leaves]
            allowed = f"another loss, where outputs and targets differ in shape as here: {shapes}"
            require(len({*shapes}) == 1, self.key, self.value, allowed)

    def _refuse_mean(self, outputs: Any, targets: Any) -> None:
        """Raise BadInput if the loss of one sample equals that of the same sample twice, as for a mean. Checks nothing
        if an output doesn't have the samples as its first dimension, or if no target of any sample counts."""
        num_samples = len(tensors_of(targets)[0])
        if any(leaf.dim() == 0 or len(leaf) != num_samples for leaf in tensors_of((outputs, targets))):
            return
        index = first_that_counts(targets)
        with torch.no_grad():
            once, twice = (
                self._number(repeated(outputs, index, times), repeated(targets, index, times)) for times in (1, 2)
            )
        allowed = (
            f"one whose criterion returns the sum of the losses, not their mean: for one sample it was {once:.4g}, for "
            f"the same sample twice {twice:.4g} (torch's losses take reduction='sum')"
        )
        require(not (once and abs(twice - once) <= SAME * abs(once)), self.key, self.value, allowed)

    def _number(self, outputs: Any, targets: Any) -> float:
        loss = self.criterion(outputs, targets)
        return float(loss) if isinstance(loss, Tensor) and loss.dim() == 0 else 0.0  # __call__ refuses others


def no_check(outputs: Any, targets: Any) -> None:
    """Takes the place of `_check_first` after the first call."""


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def first_that_counts(targets: Any) -> int:
    """The index of the first sample with a target that isn't `IGNORE`; 0 if there is none."""
    counted = [(leaf != IGNORE).flatten(1).any(1) if leaf.dim() > 1 else leaf != IGNORE for leaf in tensors_of(targets)]
    return int(torch.stack(counted).any(0).int().argmax())


def repeated(tree: Any, index: int, times: int) -> Any:
    """The tensors of one sample, `times` times."""

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.detach()[index : index + 1].repeat(times, *[1] * (tensor.dim() - 1))

    return tree_map_only(Tensor, repeat, tree)
