"""Caches FakeTensor results by operator and input metadata.

FakeTensorMode has such a cache, too, but making its keys takes several times as long as everything here. Hits are
frequent, since models repeat blocks and steps.
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
    fake_tensor_of,
    leave_fake_mode,
    without_fake_mode,
)
from lowvram.compat.torch_trees import tree_leaves

META = torch.device("meta")
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
Args = tuple[Any, ...]  # positional arguments, then the values of named ones
Remake = Callable[[Args], Any]  # makes the result of an operator from arguments with the same metadata


class CacheMiss(Exception):
    """A value can't be cached."""


@final
class FakeCache:
    """The results of operators on the tensors of one FakeTensorMode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.attributes: dict[torch.device, dict[str, Any]] = {}  # of a new fake tensor on each device
        self.remakes: dict[Any, Remake | None] = {}  # by operator and metadata; None: can't be cached

    def run(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The result of `operator(*args, **named)`."""
        all_args = (*args, *named.values())
        try:
            key = operator, tuple(named), self.metadata(all_args)
        except CacheMiss:
            return operator(*args, **named)
        remake = self.remakes.get(key)
        if remake is not None:
            leave_fake_mode()
            try:
                return remake(all_args)
            finally:
                enter_fake_mode(self.mode)
        out = operator(*args, **named)
        if key not in self.remakes:
            with without_fake_mode():
                self.remakes[key] = self.remake_of(out, all_args)
        return out

    def metadata(self, args: Iterable[Any]) -> Args:
        """The plain values among the arguments, and the metadata of the tensors.

        Raises:
            CacheMiss: an argument of another type, or another mode is active.
        """
        if current_fake_mode() is not self.mode:
            raise CacheMiss
        metadata: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is FakeTensor and value.fake_mode is self.mode and value.constant is None:
                metadata += metadata_of(value)
            elif kind in PLAIN:
                metadata += (kind, value)
            elif kind is list or kind is tuple:
                metadata.append(self.metadata(value))
            else:
                raise CacheMiss
        return tuple(metadata)

    def remake_of(self, out: Any, args: Args) -> Remake | None:
        """A function that makes a result like `out` from arguments like `args`; None if `out` can't be cached."""
        try:
            remake = self.remake_of_part(out, args)
        except CacheMiss:
            return None
        return remake if described(remake(args), args) == described(out, args) else None

    def remake_of_part(self, part: Any, args: Args) -> Remake:
        container = type(part)
        if container is list or container is tuple:
            remakes = [self.remake_of_part(item, args) for item in part]
            return lambda args: container([remake(args) for remake in remakes])
        if part is None:
            return lambda args: None
        for place, argument in enumerate(args):
            if part is argument:
                return itemgetter(place)
        if type(part) is not FakeTensor or part.constant is not None:
            raise CacheMiss
        addresses = [address(argument) if isinstance(argument, Tensor) else None for argument in args]
        owner = addresses.index(address(part)) if address(part) in addresses else None
        return partial(self.tensor, metadata_of(part), owner)

    def tensor(self, metadata: Args, owner: int | None, args: Args) -> FakeTensor:
        """A tensor with this metadata: with a storage of its own, or with that of the argument at index `owner`."""
        shape, stride, offset, dtype, device, _ = metadata
        if owner is None:
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        else:
            bare = torch.empty(0, dtype=dtype, device=META)
            bare.set_(args[owner].untyped_storage(), offset, shape, stride)
        return self.fake(bare, device)

    def fake(self, bare: Tensor, device: torch.device) -> FakeTensor:
        """The meta tensor `bare` as a fake tensor on `device`."""
        if device not in self.attributes:
            self.attributes[device] = vars(FakeTensor(self.mode, torch.empty(0, device=META), device))
        return fake_tensor_of(bare, device, self.attributes[device])


def metadata_of(tensor: FakeTensor) -> Args:
    keys = dispatch_keys(tensor).raw_repr()  # layout, a pending conjugation, and whatever else selects kernels
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, keys


def described(out: Any, args: Args) -> list[Any]:
    """For each tensor among an operator's arguments and results: metadata, bytes of its storage, and the first tensor
    that has the same storage."""
    tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, FakeTensor)]
    first: dict[int, int] = {}
    return [
        (metadata_of(tensor), tensor.untyped_storage().nbytes(), first.setdefault(address(tensor), place))
        for place, tensor in enumerate(tensors)
    ]


def address(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
