"""Caches FakeTensor results by operator and input metadata.

FakeTensorMode has such a cache, too, but making its keys takes several times as long as everything here. Hits are
frequent, since models repeat blocks and steps.

What is remembered are recipes: they hold sizes, strides and formats, but no tensors, so that several modes can share
them. A recipe holds as long as kernels aren't replaced, as a plan for a card does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from lowvram.compat.torch_modes import TorchDispatchMode, without_function_modes
from lowvram.compat.torch_trees import tree_leaves

META = torch.device("meta")
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
TORCHS = {"aten", "prim", "prims"}  # namespaces of torch's own operators
MOST_RECIPES = 100_000  # about 100 MB
Args = tuple[Any, ...]  # positional arguments, then the values of named ones
# Makes the result of an operator for the tensors of a cache, from arguments with the same metadata.
Recipe = Callable[["FakeCache", Args], Any]
Recipes = dict[Any, Recipe | None]  # by operator and metadata; None: can't be cached


class CacheMiss(Exception):
    """A value can't be cached."""


@final
class FakeCache:
    """The results of operators on the tensors of one FakeTensorMode.

    Args:
        recipes: those of torch's own operators that are known so far, which the cache adds to.
    """

    def __init__(self, mode: FakeTensorMode, recipes: Recipes | None = None) -> None:
        self.mode = mode
        self.attributes: dict[torch.device, dict[str, Any]] = {}  # of a new fake tensor on each device
        self.shared: Recipes = {} if recipes is None else recipes
        self.own: Recipes = {}  # of others' operators: what these make may depend on more than their arguments

    def run(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The result of `operator(*args, **named)`."""
        all_args = (*args, *named.values())
        try:
            key = operator, tuple(named), torch.get_default_dtype(), self.metadata(all_args)
        except CacheMiss:
            return operator(*args, **named)
        recipes = self.shared if operator.namespace in TORCHS else self.own
        recipe = recipes.get(key)
        if recipe is not None:
            leave_fake_mode()
            try:
                return recipe(self, all_args)
            finally:
                enter_fake_mode(self.mode)
        if key in recipes:
            return operator(*args, **named)
        before = described((), all_args)
        out = operator(*args, **named)
        # An operator that gives an argument another shape or memory, as `unsqueeze_` does, runs each time.
        is_as_before = described((), all_args) == before
        if len(recipes) >= MOST_RECIPES:
            recipes.clear()
        with without_fake_mode():
            recipes[key] = self.recipe_of(out, all_args) if is_as_before else None
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

    def recipe_of(self, out: Any, args: Args) -> Recipe | None:
        """A function that makes a result like `out` from arguments like `args`; None if `out` can't be cached."""
        try:
            recipe = recipe_of_part(out, args)
        except CacheMiss:
            return None
        return recipe if described(recipe(self, args), args) == described(out, args) else None

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


@final
class CachedOperators(TorchDispatchMode):
    """Inside it, and inside `mode`, operators that have been met on such tensors aren't worked out again. What a model
    holds compiled runs as it was written: torch compiles nothing inside a mode that isn't a `FastDispatchMode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_cache = FakeCache(mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_function_modes():  # what torch calls to find a size is nothing that the model calls
            return self.fake_cache.run(func, args, kwargs or {})


def recipe_of_part(part: Any, args: Args) -> Recipe:
    container = type(part)
    if container is list or container is tuple:
        recipes = [recipe_of_part(item, args) for item in part]
        return lambda cache, args: container([recipe(cache, args) for recipe in recipes])
    if part is None:
        return lambda cache, args: None
    for place, argument in enumerate(args):
        if part is argument:
            return lambda cache, args: args[place]
    if type(part) is not FakeTensor or part.constant is not None:
        raise CacheMiss
    addresses = [address(argument) if isinstance(argument, Tensor) else None for argument in args]
    owner = addresses.index(address(part)) if address(part) in addresses else None
    metadata = metadata_of(part)
    return lambda cache, args: cache.tensor(metadata, owner, args)


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
