"""The last layer for options that treat it otherwise than the others."""

from __future__ import annotations

from torch import Tensor, nn

from lowvram.core.ranks import rank
from lowvram.core.rig import Task

TOLD: set[str] = set()  # options whose line was printed


def known_last_weights(task: Task, model: nn.Module, option: str) -> set[Tensor]:
    """`Task.last_weights`; if they aren't known, a line says so, once for each option."""
    last = task.last_weights(model)
    if not last and option not in TOLD and rank() == 0:
        TOLD.add(option)
        print(f"{option}: which layer is the model's last isn't known, so each is treated as an inner one", flush=True)
    return last
