"""Lets an optimizer update parameters that are laid out over the ranks in different ways."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def layout_of(tensor: Tensor) -> Hashable:
    """What tensors have in common that torch can compute with in one call."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def update_by_layout(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Have the optimizer's update meet parameters of one layout at a time: torch's operators for lists of tensors
    refuse lists of several kinds. Its groups are as they were made, but for the time of an update."""
    if len({*map(layout_of, parameters)}) < 2:
        return
    update: Callable[..., Any] = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        groups, parted = optimizer.param_groups, [[*by_layout(group)] for group in optimizer.param_groups]
        optimizer.param_groups = [each for of_group in parted for each in of_group]
        try:
            return update(*args, **kwargs)
        finally:
            optimizer.param_groups = groups
            for group, of_group in zip(groups, parted, strict=True):
                for part in of_group[:1]:  # what the update changes in a group, it changes alike in each part of it
                    group.update({name: value for name, value in part.items() if name != "params"})

    optimizer.step = step


def by_layout(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A group of parameters as several, in each of which all are laid out alike."""
    parameters: dict[Hashable, list[Tensor]] = {}
    for parameter in group["params"]:
        parameters.setdefault(layout_of(parameter), []).append(parameter)
    return ({**group, "params": each} for each in parameters.values())
