"""The values of fake tensors that a plan knows: those that follow from constants and shapes alone, such as positions
and masks.

Some models read such values. Those of the library transformers attend without a mask if the positions of each row count
up and nothing is padded, which takes far less memory. While operators run, only what made each value is noted; it is
computed on real tensors when code reads it, which is rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lowvram.compat.torch_fake import FakeTensor
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_ops import schema_of
from lowvram.compat.torch_trees import tree_leaves, tree_map

ATEN = torch.ops.aten
CONSTANT = ATEN.lift_fresh.default  # a real tensor becomes a fake one, with a storage of its own
EMPTY = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.empty_permuted, ATEN.new_empty, ATEN.new_empty_strided}
DEEPEST = 200  # operators in the longest chain that makes a value: recursion over more could overflow Python's stack


class UnknownValue(Exception):
    """A value depends on weights, samples or random numbers."""


class Metadata(NamedTuple):
    """Where a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def metadata_of(tensor: Tensor) -> Metadata:
    return Metadata(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@final
@dataclass(frozen=True)
class Operand:
    """A tensor that an operator read: where it lies in its storage, and the storage's content at that time."""

    content: Content
    metadata: Metadata

    @property
    def value(self) -> Tensor:
        return self.metadata.on(self.content.storage)


@final
@dataclass(frozen=True)
class Content:
    """How to compute the content of a storage: the operator that has returned it or, if `is_in_place`, has changed the
    storage of its first argument, and that operator's arguments."""

    operator: Any
    args: tuple[Any, ...]  # with an `Operand` for each fake tensor
    named: Mapping[str, Any]
    metadata: Metadata  # of the result
    is_in_place: bool
    depth: int  # operators in the longest chain that leads here

    @cached_property
    def storage(self) -> torch.UntypedStorage:
        args, named = (tree_map(value_of, each) for each in (self.args, self.named))
        if self.is_in_place:
            target: Operand = self.args[0]
            storage = target.content.storage.clone()
            self.operator(target.metadata.on(storage), *args[1:], **named)
            return storage
        result = self.operator(*args, **named)
        laid_out = torch.empty_strided(self.metadata.shape, self.metadata.stride, dtype=self.metadata.dtype)
        return laid_out.copy_(result).untyped_storage()


def value_of(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Operand) else leaf


@final
class KnownValues:
    """The contents of the storages of fake tensors, as far as they are known."""

    def __init__(self) -> None:
        self.contents: WeakKeyDictionary[torch.UntypedStorage, Content] = WeakKeyDictionary()

    def note(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], out: Any) -> None:
        """Note that an operator has run on fake tensors: keep how its result was made, or forget what it overwrote."""
        if type(out) is FakeTensor and args and type(args[0]) is FakeTensor and not named and not self.has(args[0]):
            return  # the usual case: from an unknown tensor, so its result is unknown, too
        if type(out) is not FakeTensor:
            if writes(operator):
                self.forget(tree_leaves((args, named)))
        elif writes(operator) or not operator.is_view or operator is CONSTANT:
            try:
                self.contents[out.untyped_storage()] = self.content(operator, args, named, out)
            except UnknownValue:
                if writes(operator):
                    self.forget([out])

    def content(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], out: Tensor) -> Content:
        """The content of the storage of `out`. Raises UnknownValue if it isn't known."""
        is_in_place = writes(operator)
        is_plain = not is_in_place or (bool(args) and out is args[0])  # and not an argument `out=`
        is_unknown = args and type(args[0]) is FakeTensor and not self.has(args[0])
        if is_unknown or not is_plain or is_arbitrary(operator):
            raise UnknownValue
        args, named = (tree_map(self.operand, each) for each in (args, named))
        operands = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Operand)]
        depth = 1 + max((operand.content.depth for operand in operands), default=0)
        if depth > DEEPEST:
            raise UnknownValue
        return Content(operator, args, dict(named), metadata_of(out), is_in_place, depth)

    def operand(self, leaf: Any) -> Any:
        """An argument, as a `Content` keeps it. Raises UnknownValue for a tensor whose value isn't known."""
        if isinstance(leaf, FakeTensor):
            content = self.contents.get(leaf.untyped_storage())
            if content is None:
                raise UnknownValue
            return Operand(content, metadata_of(leaf))
        if isinstance(leaf, Tensor) and (type(leaf) is not Tensor or leaf.is_meta):
            raise UnknownValue
        return leaf

    def forget(self, leaves: Iterable[Any]) -> None:
        """The values of these tensors aren't known from now on."""
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                self.contents.pop(leaf.untyped_storage(), None)

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.contents

    def number(self, tensor: Tensor) -> int | bool:
        """The value of a tensor of one element. Raises UnknownValue if it isn't known."""
        operand: Operand = self.operand(tensor)
        with without_dispatch_modes():
            return operand.value.item()  # pyright: ignore[reportReturnType]


@cache
def is_arbitrary(operator: Any) -> bool:
    """Whether an operator's result doesn't follow from its arguments: random numbers, or uninitialised memory."""
    return operator.overloadpacket in EMPTY or torch.Tag.nondeterministic_seeded in operator.tags


@cache
def writes(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return schema_of(operator).is_mutable
