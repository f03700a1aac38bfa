"""Caches FakeTensor results by operator and input metadata.

FakeTensorMode works that out on meta tensors, or finds it in a cache of its own, whose keys take several times as long
as all that is done here. A model repeats itself, block by block and step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import (
    FakeTensor,
    FakeTensorMode,
    current_fake_mode,
    dispatch_keys,
    enter_fake_mode,
    fake_mode_lifted,
    fake_tensor_of,
    leave_fake_mode,
)
from lowvram.compat.torch_trees import tree_leaves

META = torch.device("meta")
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
Given = tuple[Any, ...]  # arguments, those by name last
Remake = Callable[[Given], Any]


class CacheMiss(Exception):
    """Something is like nothing else."""


@final
class FakeCache:
    """Of operators on the tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.attributes: dict[torch.device, dict[str, Any]] = {}  # of tensors there, as they are born
        self.known: dict[Any, Remake | None] = {}  # by operator and likeness; None: each has to be worked out

    def run(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What `operator(*args, **named)` makes."""
        given = (*args, *named.values())
        try:
            key = operator, tuple(named), self.likeness(given)
        except CacheMiss:
            return operator(*args, **named)
        remake = self.known.get(key)
        if remake is not None:
            leave_fake_mode()
            try:
                return remake(given)
            finally:
                enter_fake_mode(self.mode)
        out = operator(*args, **named)
        if key not in self.known:
            with fake_mode_lifted():
                self.known[key] = self.remake_of(out, given)
        return out

    def likeness(self, given: Iterable[Any]) -> Given:
        """All of the arguments but the memory of tensors.

        Raises:
            CacheMiss: there is something else among them, or another mode is at work.
        """
        if current_fake_mode() is not self.mode:
            raise CacheMiss
        found: list[Any] = []
        for value in given:
            kind = type(value)
            if kind is FakeTensor and value.fake_mode is self.mode and value.constant is None:
                found += likeness_of(value)
            elif kind in PLAIN:
                found += (kind, value)
            elif kind is list or kind is tuple:
                found.append(self.likeness(value))
            else:
                raise CacheMiss
        return tuple(found)

    def remake_of(self, out: Any, given: Given) -> Remake | None:
        """How the like of an outcome is made of the like of what was given; None: that is not known."""
        try:
            remake = self.remake_of_part(out, given)
        except CacheMiss:
            return None
        return remake if described(remake(given), given) == described(out, given) else None

    def remake_of_part(self, part: Any, given: Given) -> Remake:
        container = type(part)
        if container is list or container is tuple:
            remakes = [self.remake_of_part(each, given) for each in part]
            return lambda given: container([remake(given) for remake in remakes])
        if part is None:
            return lambda given: None
        for place, argument in enumerate(given):
            if part is argument:
                return itemgetter(place)
        if type(part) is not FakeTensor or part.constant is not None:
            raise CacheMiss
        addresses = [address(each) if isinstance(each, Tensor) else None for each in given]
        owner = addresses.index(address(part)) if address(part) in addresses else None
        return partial(self.tensor, likeness_of(part), owner)

    def tensor(self, likeness: Given, owner: int | None, given: Given) -> FakeTensor:
        """With memory of its own, or with that of the argument at one place."""
        shape, stride, offset, dtype, device, _ = likeness
        if owner is None:
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        else:
            bare = torch.empty(0, dtype=dtype, device=META)
            bare.set_(given[owner].untyped_storage(), offset, shape, stride)
        return self.fake(bare, device)

    def fake(self, bare: Tensor, device: torch.device) -> FakeTensor:
        if device not in self.attributes:
            self.attributes[device] = vars(FakeTensor(self.mode, torch.empty(0, device=META), device))
        return fake_tensor_of(bare, device, self.attributes[device])


def likeness_of(tensor: FakeTensor) -> Given:
    keys = dispatch_keys(tensor).raw_repr()  # layout, a pending conjugation, and what else torch tells apart
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, keys


def described(out: Any, given: Given) -> list[Any]:
    """What all tensors of an operator are like, and which of them share their memory."""
    tensors = [leaf for leaf in tree_leaves((given, out)) if isinstance(leaf, FakeTensor)]
    first: dict[int, int] = {}
    return [
        (likeness_of(tensor), tensor.untyped_storage().nbytes(), first.setdefault(address(tensor), place))
        for place, tensor in enumerate(tensors)
    ]


def address(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
