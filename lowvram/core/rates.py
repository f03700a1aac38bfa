"""Learning rates of an optimizer's parameter groups, which a schedule multiplies."""

from __future__ import annotations

from torch.optim import Optimizer

from lowvram.config.errors import Incompatible

RATIO = "lr_ratio"  # a group's entry: its learning rate over the one that the user named
OWN = "own_lr"  # a group's entry, if the optimizer sets its learning rates itself: the one that the user named


def note_rates(optimizer: Optimizer, lr: float, sets_lr: bool) -> None:
    """Note the rates that a new optimizer's groups were made with.

    Args:
        lr: the one that the user named.
        sets_lr: the optimizer changes the rates of its groups itself, or doesn't read them.
    """
    for group in optimizer.param_groups:
        if sets_lr:
            group[OWN] = lr
        elif "lr" in group and float(group["lr"]) != lr:
            group[RATIO] = float(group["lr"]) / lr


def set_rates(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the updates to come. Groups that were made with rates of their own keep their ratio.

    Raises:
        Incompatible: the optimizer sets its rates itself, and `lr` isn't the one that it was made with.
    """
    for group in optimizer.param_groups:
        if OWN not in group:
            group["lr"] = lr * group.get(RATIO, 1.0)
        elif lr != group[OWN]:
            raise Incompatible(
                f"optimizer: {type(optimizer).__name__} sets its learning rates itself: it changes those of its"
                f" parameter groups, or doesn't read them, so it can't follow a schedule"
                f" (optimizer.lr={group[OWN]:g}, by the schedule {lr:g}): choose schedule=constant"
            )
