"""The only training step in the repository: plan, measure and train all run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lowvram.core.rig import Part, Rig, Update


def step(rig: Rig, batch: Part) -> tuple[Tensor, Update]:
    """One optimizer update on one logical batch.

    Returns:
        The mean loss over the batch's targets (0-dim, on the device, detached), and whether the update was applied.
    """
    parts = rig.split(batch)
    rig.stepper.begin(len(parts))
    loss = rig.run(rig, parts, rig.total(parts))
    update = rig.stepper.update()
    rig.finish()
    return loss, update
