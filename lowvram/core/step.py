"""The only training step in the repository: plan, measure and train all run it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput
from lowvram.core.rig import Part
from lowvram.core.stepper import Update

if TYPE_CHECKING:
    from lowvram.core.rig import Rig


def step(rig: Rig, batch: Part) -> tuple[Tensor, Update]:
    """One optimizer update on one logical batch.

    Returns:
        The mean loss over the batch's targets (0-dim, on the device, detached), and whether the update was applied. Of
        a batch in which no target counts the mean is nan, and the gradients are 0.
    """
    parts = rig.split(checked(batch))
    rig.stepper.begin(len(parts))
    total = rig.total(parts)
    total = total.float().where(total > 0, math.inf)
    loss = rig.run(rig, parts, total)
    update = rig.stepper.update()
    rig.finish()
    return loss.where(total.isfinite(), math.nan), update


def checked(batch: Part) -> Part:
    """The batch. Raises BadInput if it is no `Part`, as a loop of one's own may make it, or has no targets."""
    if type(batch) is not Part:
        raise BadInput("batch", type(batch).__name__, "a lowvram.Part(inputs, targets)")
    targets = tree_leaves(batch.targets)
    strange = next((type(each).__name__ for each in targets if not isinstance(each, Tensor)), None)
    if strange is not None or not targets:
        allowed = "tensors, or tensors in dictionaries and tuples (torch.as_tensor makes one of an array)"
        raise BadInput("batch.targets", strange, allowed)
    if targets[0].dim() == 0 or not len(targets[0]):
        raise BadInput("batch.targets", tuple(targets[0].shape), "tensors with a row for each sample, one at least")
    return batch
