"""Lets an optimizer update parameters that are laid out over the ranks in different ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Group = dict[str, Any]  # of an optimizer's param_groups


def layout_of(tensor: Tensor) -> Hashable:
    """What tensors have in common that torch can compute with in one call."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def update_by_layout(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Have the optimizer's update meet parameters of one layout at a time: torch's operators for lists of tensors
    refuse lists of several kinds."""
    if len({*map(layout_of, parameters)}) > 1:
        update_in_groups(optimizer, by_layout)


def update_in_groups(
    optimizer: Optimizer, parted: Callable[[Group], Iterable[Group]], own: Collection[str] = ()
) -> None:
    """Have the optimizer's update meet each of its groups of parameters as several. Its groups are as they were made,
    but for the time of an update, so that a saved state doesn't depend on it.

    Args:
        parted: the groups in place of one.
        own: the entries that may differ between these. What an update changes in the others, it changes alike.
    """
    update: Callable[..., Any] = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        groups, parts = optimizer.param_groups, [[*parted(group)] for group in optimizer.param_groups]
        optimizer.param_groups = [each for of_group in parts for each in of_group]
        try:
            return update(*args, **kwargs)
        finally:
            optimizer.param_groups = groups
            for group, of_group in zip(groups, parts, strict=True):
                for part in of_group[:1]:
                    group.update({name: value for name, value in part.items() if name not in ("params", *own)})

    optimizer.step = step


def by_layout(group: Group) -> Iterator[Group]:
    """A group of parameters as several, in each of which all are laid out alike."""
    parameters: dict[Hashable, list[Tensor]] = {}
    for parameter in group["params"]:
        parameters.setdefault(layout_of(parameter), []).append(parameter)
    return ({**group, "params": each} for each in parameters.values())
