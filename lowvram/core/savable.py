"""Whether a snapshot can hold a state, asked before work depends on it. A snapshot is read back without running code,
so it holds tensors and plain values."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowvram.config.errors import Incompatible
from lowvram.core.mesh import tell

PLAIN = (type(None), bool, int, float, str)
TENSORS = (Tensor, torch.nn.Parameter, DTensor)
OURS = ("torch.", "torchao.", "lowvram.")  # whose classes of tensors are known to be readable
MEND = "keep it as a tensor, a number or a text, or elsewhere"
OWNERS = {"model": "model", "stepper": "optimizer"}  # whose state each part is, for messages


@final
class Savable:
    """Checks the states of a run.

    Args:
        state: before the first step.
        model: all tensors of the model's state then, also those that the state leaves out until the model thaws them.

    Raises:
        Incompatible: a snapshot can't hold it.
    """

    def __init__(self, state: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        self._groups, self._is_told = groups_in(state["stepper"]), False
        self._shapes = shapes_in(model)
        if found := self._wrong(state):
            raise Incompatible(found)

    def check(self, state: Mapping[str, Any], step: int) -> bool:
        """Whether a snapshot can hold the state after a step. Raises Incompatible if it can't after step 1. Later no
        more than that is lost: the run goes on, and a line says so."""
        found = self._wrong(state)
        if found and step == 1:
            raise Incompatible(found)
        if found and not self._is_told:
            tell(f"warning: from step {step} on no snapshot can be saved, only the weights at the end: {found}")
            self._is_told = True
        return not found

    def _wrong(self, state: Mapping[str, Any]) -> str | None:
        for part, owner in OWNERS.items():
            if place := unreadable(state[part]):
                return f"{owner}: snapshots can't hold its state, as {place}: {MEND}"
        if groups_in(state["stepper"]) != self._groups:
            return "optimizer: snapshots can't hold its state, as it changes its parameter groups while it trains"
        if change := changed_shape(self._shapes, shapes_in(state["model"])):
            return (
                f"model: neither snapshots nor the exported weights could be loaded, as {change} while it trains, and a"
                " model that is made again has what its constructor makes: let that make the buffer as large as it gets"
                " (and count the rows in use), or register it with persistent=False"
            )
        return None


def shapes_in(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def changed_shape(before: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]]) -> str | None:
    """Which tensor has another shape than before, or is new; None if there is none. One that isn't there any more was
    frozen by the model, or is left out of snapshots."""
    for name, shape in now.items():
        if name not in before:
            return f"{name} is added"
        if shape != before[name]:
            return f"{name} changes its shape from {before[name]} to {shape}"
    return None


def unreadable(state: Any, place: str = "") -> str | None:
    """The first place in a state, and the type there, that can't be read back; None if there is none."""
    kind = type(state)
    if kind in PLAIN or kind in TENSORS or (isinstance(state, Tensor) and kind.__module__.startswith(OURS)):
        return None
    if isinstance(state, dict) and kind in (dict, OrderedDict):
        found = (
            unreadable(key, f"{place}.{key}") or unreadable(value, f"{place}.{key}") for key, value in state.items()
        )
        return next(filter(None, found), None)
    if isinstance(state, list | tuple) and kind in (list, tuple):
        return next(filter(None, (unreadable(each, f"{place}.{index}") for index, each in enumerate(state))), None)
    return None if comes_back(state) else f"{place.removeprefix('.')} is a {kind.__module__}.{kind.__qualname__}"


def comes_back(value: Any) -> bool:
    """Whether a value is read back as it was saved, by trial."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return type(torch.load(file, weights_only=True)) is type(value)
    except Exception:  # of any class of the user's own
        return False


def groups_in(state: Any) -> list[list[int]]:
    """How many parameters each parameter group has, of each optimizer in a state."""
    return list(_groups_in(state))


def _groups_in(state: Any) -> Iterator[list[int]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            if name == "param_groups":
                yield [len(group["params"]) for group in value]
            else:
                yield from _groups_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _groups_in(value)
