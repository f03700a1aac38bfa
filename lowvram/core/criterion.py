"""The user's own criterion. It must return the sum over the targets, as losses of the parts of a batch are added."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.errors import require
from lowvram.core.rig import IGNORE
from lowvram.core.torch_losses import (
    ClassCount,
    check_labels,
    check_shapes,
    count_elements,
    labels_named,
    num_classes,
    sum_and_count,
)

PLAIN = (Tensor, int, float, complex, str)
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
        if isinstance(self.count, ClassCount):
            with labels_named(num_classes(outputs), self.count.loss.ignore_index):
                loss = self.criterion(outputs, targets)
        else:
            loss = self.criterion(outputs, targets)
        is_sum = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        allowed = "one whose criterion returns one number as a tensor, the sum of the losses of all targets"
        require(is_sum, self.key, self.value, allowed)
        return loss

    def _check_first(self, outputs: Any, targets: Any) -> None:
        """Called before the first loss is computed from values; a plan has none."""
        leaves = tensors_of((outputs, targets))
        if isinstance(self.count, ClassCount) and len(leaves) == 2:
            check_shapes(leaves[0], leaves[1], self.key, self.value)
        if self.count is count_elements:
            shapes = [tuple(leaf.shape) for leaf in leaves]
            allowed = f"another loss, where outputs and targets differ in shape as here: {shapes}"
            require(len({*shapes}) == 1, self.key, self.value, allowed)
        if any(is_fake(leaf) for leaf in leaves):
            return
        self._prepare = no_check
        if isinstance(self.criterion, nn.Module) and leaves:
            self.criterion.to(leaves[0].device)  # weights of classes, for example
        if self.count is None:
            self._refuse_mean(outputs, targets)
        elif isinstance(self.count, ClassCount):
            check_labels(targets, num_classes(outputs), self.count.loss.ignore_index)

    def _refuse_mean(self, outputs: Any, targets: Any) -> None:
        """Raise BadInput if the loss of one sample equals that of the same sample twice, as for a mean. Checks nothing
        if an output doesn't have the samples as its first dimension or is an object that can't be taken apart, or if no
        target of any sample counts."""
        num_samples = len(tensors_of(targets)[0])
        if not all(leaf is None or isinstance(leaf, PLAIN) or fields_of(leaf) for leaf in tree_leaves(outputs)):
            return
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
    """All tensors, also those in the fields of objects."""
    leaves = tree_leaves(tree)
    in_fields = (each for leaf in leaves for each in tree_leaves(list(fields_of(leaf).values())))
    return [each for each in (*leaves, *in_fields) if isinstance(each, Tensor)]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an object of the user's own class, such as a dataclass for a model's outputs; {} of others."""
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return {}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(getattr(value, "__dict__", {}))


def first_that_counts(targets: Any) -> int:
    """The index of the first sample with a target that isn't `IGNORE`; 0 if there is none."""
    counted = [(leaf != IGNORE).flatten(1).any(1) if leaf.dim() > 1 else leaf != IGNORE for leaf in tensors_of(targets)]
    return int(torch.stack(counted).any(0).int().argmax())


def repeated(tree: Any, index: int, times: int) -> Any:
    """The tensors of one sample, `times` times."""

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach()[index : index + 1].repeat(times, *[1] * (leaf.dim() - 1))
        if not (of_leaf := fields_of(leaf)):
            return leaf
        twin = copy(leaf)
        for name, value in tree_map(repeat, of_leaf).items():
            object.__setattr__(twin, name, value)  # a frozen dataclass too
        return twin

    return tree_map(repeat, tree)
