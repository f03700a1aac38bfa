"""The only training step in the repository: plan, measure and train all run it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lowvram.core.rig import Part, Rig
from lowvram.core.stepper import Update


def step(rig: Rig, batch: Part) -> tuple[Tensor, Update]:
    """One optimizer update on one logical batch.

    Returns:
        The mean loss over the batch's targets (0-dim, on the device, detached), and whether the update was applied. Of
        a batch in which no target counts the mean is nan, and the gradients are 0.
    """
    parts = rig.split(batch)
    rig.stepper.begin(len(parts))
    total = rig.total(parts)
    total = total.float().where(total > 0, math.inf)
    loss = rig.run(rig, parts, total)
    update = rig.stepper.update()
    rig.finish()
    return loss.where(total.isfinite(), math.nan), update
