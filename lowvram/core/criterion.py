"""The user's own criterion. It must return the sum over the targets, as losses of the parts of a batch are added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import require
from lowvram.core.copies import original
from lowvram.core.loss_parts import Holder, holder_of, unchanged_afterwards
from lowvram.core.loss_trial import counts_ignored_floats, is_float, tensors_of, tried, whole_and_halves
from lowvram.core.mesh import tell
from lowvram.core.rig import IGNORE, Part
from lowvram.core.shards import is_sharded
from lowvram.core.torch_losses import (
    ClassCount,
    check_labels,
    check_shapes,
    count_elements,
    labels_named,
    num_classes,
    sum_and_count,
)


@final
class UserCriterion:
    """Calls a criterion and checks that it returns one number. Means of torch's own losses are turned into sums; the
    first call checks that others aren't means, and have no weights of their own.

    Args:
        criterion: outputs, targets -> the sum of the losses of all targets (0-dim), or one of torch's losses.
        key, value: the dotted key and the value by which the user chose it, for messages.
        count: the user's own: targets -> what the sum is to be divided by; None: there is none.

    Raises:
        BadInput: when called, if the criterion returned something else, or a mean.
    """

    def __init__(self, criterion: Callable[[Any, Any], Any], key: str, value: object, count: Any = None) -> None:
        of_torch = sum_and_count(criterion)
        self.criterion, self.key, self.value = of_torch.total if of_torch else criterion, key, value
        self.count = of_torch.count if of_torch else None  # targets -> what the sum is to be divided by; None: unknown
        self.own_count = count if callable(count) else None
        self.models: Callable[[], Iterable[nn.Module]] = lambda: ()  # those that train, no part of the criterion
        self.counts_floats = False  # whether the criterion counts targets that are floats, whatever their value
        self.num_parts = 1  # of the batch, if this call is that of its first part
        self._prepare: Callable[[Any, Any], None] = self._check_first
        self._check_parts: Callable[[Any, Any, int], None] = no_check if of_torch else self._check_additive

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        num_parts, self.num_parts = self.num_parts, 1
        self._prepare(outputs, targets)
        if num_parts > 1:
            self._check_parts(outputs, targets, num_parts)
        if isinstance(self.count, ClassCount):
            with labels_named(num_classes(outputs), self.count.loss.ignore_index):
                loss = self.criterion(outputs, targets)
        else:
            loss = self.criterion(outputs, targets)
        is_sum = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        allowed = "one whose criterion returns one number as a tensor, the sum of the losses of all targets"
        require(is_sum, self.key, self.value, allowed)
        return loss

    def num_targets(self, part: Part) -> Tensor:
        """How many targets the sum is over (0-dim). Only whole numbers are left out as `IGNORE` where the criterion
        has been seen to count floats of that value."""
        if (count := self.own_count or self.count) is not None:
            return torch.as_tensor(count(part.targets), device=part.device)
        if not self.counts_floats:
            return part.num_targets
        leaves = tree_leaves(part.targets)
        counted = [
            leaf.new_tensor(leaf.numel(), dtype=torch.long) if is_float(leaf) else (leaf != IGNORE).sum()
            for leaf in leaves
        ]
        return torch.stack(counted).sum()

    @property
    def holder(self) -> Holder:
        """The modules and objects that the criterion calls."""
        return holder_of(self.criterion, self.models())

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
            self._try(outputs, targets)
        elif isinstance(self.count, ClassCount):
            check_labels(targets, num_classes(outputs), self.count.loss.ignore_index)

    def _try(self, outputs: Any, targets: Any) -> None:
        """Raise BadInput if the loss of some samples equals that of the same samples twice, as for a mean, or if the
        criterion has weights of its own. A line says what can't be known."""
        holder = self.holder
        with unchanged_afterwards(holder), torch.enable_grad(), saved_tensors_hooks(same, same):
            trial = tried(self.criterion, outputs, targets)
        with unchanged_afterwards(holder), torch.no_grad():
            self.counts_floats = counts_ignored_floats(self.criterion, outputs, targets)
        self._refuse_ignored(targets)
        own = self._own_weights(trial.weights, holder)
        allowed = (
            f"one without weights of its own: {own} would get gradients, and never train. Make it a part of the model,"
            " or freeze it with requires_grad_(False)"
        )
        require(own is None, self.key, self.value, allowed)
        allowed = (
            f"one whose criterion returns the sum of the losses, not their mean: for {trial.samples} it was"
            f" {trial.once:.4g}, for the same twice {trial.twice:.4g} (torch's losses take reduction='sum')"
        )
        require(not trial.is_mean, self.key, self.value, allowed)
        if trial.doubt is not None:
            self._tell(trial.doubt)

    def _refuse_ignored(self, targets: Any) -> None:
        """Raise BadInput if targets of the first batch were left out of the number of targets, and aren't of the
        loss."""
        floats = [leaf for leaf in tensors_of(targets) if is_float(leaf)]
        is_counted = (
            self.counts_floats and self.own_count is None and any(bool((leaf == IGNORE).any()) for leaf in floats)
        )
        allowed = (
            f"one that leaves out targets of {IGNORE}, as their number does, or that has count(targets), which returns"
            " how many count, such as targets.numel()"
        )
        require(not is_counted, self.key, self.value, allowed)

    def _own_weights(self, weights: list[Tensor], holder: Holder) -> str | None:
        """The name or the shape of one of the weights that isn't the model's; None if there is none."""
        of_models = [weight for model in self.models() for weight in model.parameters()]
        known = {id(weight) for weight in of_models}
        names = {id(weight): name.partition(".")[2] for name, weight in holder.named_parameters()}
        # A sharded model has computed with gathered weights, which are nobody's afterwards.
        are_gathered = any(map(is_sharded, of_models))
        strange = (weight for weight in weights if id(original(weight)) not in known)
        found = next((weight for weight in strange if id(weight) in names or not are_gathered), None)
        return None if found is None else names.get(id(found), f"a tensor of shape {tuple(found.shape)}")

    def _check_additive(self, outputs: Any, targets: Any, num_parts: int) -> None:
        """Tell once if the loss of a part isn't the sum of the losses of its samples, so that parts change it."""
        if any(is_fake(leaf) for leaf in tensors_of((outputs, targets))):
            return
        self._check_parts = no_check
        with unchanged_afterwards(self.holder), torch.no_grad():
            found = whole_and_halves(self.criterion, outputs, targets)
        if found is not None:
            self._tell(
                f"the loss of several samples isn't the sum of theirs (for some together {found[0]:.4g}, in two parts"
                f" {found[1]:.4g}): in {num_parts} parts (accum) it is another loss than that of the whole batch;"
                " accum=none computes the whole"
            )

    def _tell(self, text: str) -> None:
        tell(f"warning: {self.key}={self.value!r}: {text}")


def no_check(*_: object) -> None:
    """Takes the place of a check that was made."""


def same(tensor: Tensor) -> Tensor:
    return tensor
