"""Whether a snapshot can hold a state: it is read back without running code, so it holds tensors and plain values."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PLAIN = (type(None), bool, int, float, str)
TENSORS = (Tensor, torch.nn.Parameter, DTensor)
OURS = ("torch.", "torchao.", "lowvram.")  # whose classes of tensors are known to be readable


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
