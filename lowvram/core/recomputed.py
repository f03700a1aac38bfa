"""What the backward pass computes again: whether there will be one, marks for operators that run twice, and the
surroundings in which they ran first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.errors import Incompatible
from lowvram.core.changes import OfContents, are_same, contents_of
from lowvram.core.places import DEEPEST, containers

Forward = Callable[..., Any]
_IS_RECOMPUTED = ContextVar("is_recomputed", default=False)  # of the thread: a card's backward pass has its own


@contextmanager
def recomputed_later() -> Iterator[None]:
    """Around operators whose results the backward pass computes again."""
    token = _IS_RECOMPUTED.set(True)
    try:
        yield
    finally:
        _IS_RECOMPUTED.reset(token)


def is_recomputed_later() -> bool:
    """Whether the running operator is inside `recomputed_later`."""
    return _IS_RECOMPUTED.get()


_KEEPS_EVERYTHING = ContextVar("keeps_everything", default=False)


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Around a model whose arithmetic is counted: what it would compute again by itself, it keeps."""
    token = _KEEPS_EVERYTHING.set(True)
    try:
        yield
    finally:
        _KEEPS_EVERYTHING.reset(token)


def keeps_everything() -> bool:
    """Whether the running operator is inside `nothing_recomputed`."""
    return _KEEPS_EVERYTHING.get()


def has_backward(module: nn.Module, inputs: Any) -> bool:
    """Whether a call of the module with these inputs, in any nesting, gets a backward pass. Without one there is
    nothing to recompute, and torch.compile may fail on it."""
    tensors = tensors_of(inputs)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def as_first_called(forward: Forward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Forward:
    """`forward` for a call with these arguments, and for its recomputations. These get lists, dictionaries and objects
    as they were when the first call began: between the two, the model may add to them what the block returned."""
    if all(map(is_simple, (*inputs, *named.values()))):
        return forward
    kept, is_first = tree_map(itself, (inputs, named)), [True]
    forward = with_objects_as_first(forward, (inputs, named))

    def call(*inputs: Any, **named: Any) -> Any:
        if is_first:
            is_first.clear()
            return forward(*inputs, **named)
        inputs, named = tree_map(itself, kept)  # other lists each time: the block may change them
        return forward(*inputs, **named)

    return call


def with_objects_as_first(forward: Forward, arguments: Any) -> Forward:
    """The same of the objects alone that are among the arguments, in any nesting: a block may write what it returns
    into the object that it was given."""
    objects = Objects(arguments)
    return objects.call(forward) if objects.contents else forward


@final
class Objects:
    """What objects hold that a call is given, also those in lists and dictionaries, and in each other."""

    def __init__(self, arguments: Any) -> None:
        self.contents = [OfContents(what, each, contents_of(each)) for what, each in objects_in(arguments)]
        self.changed: list[OfContents] | None = None  # by the first call

    def call(self, forward: Forward) -> Forward:
        """`forward`, whose calls after the first find in the objects what the first one found, and leave there what
        they find."""

        def call(*inputs: Any, **named: Any) -> Any:
            if self.changed is None:
                outputs = forward(*inputs, **named)
                self.changed = self.differing()
                return outputs
            with self.as_before(list(dict.fromkeys([*self.changed, *self.differing()]))):
                return forward(*inputs, **named)

        return call

    def differing(self) -> list[OfContents]:
        return [each for each in self.contents if not are_same(each.container, each.before)]

    @contextmanager
    def as_before(self, changes: list[OfContents]) -> Iterator[None]:
        for each in changes:
            each.undo()
        try:
            yield
        finally:
            for each in reversed(changes):
                each.redo()


def objects_in(arguments: Any) -> Iterator[tuple[str, Any]]:
    """What holds something in the objects among a call's arguments, each once and with a name for messages."""
    seen: set[int] = set()
    for leaf in tree_leaves(arguments):
        if not is_simple(leaf):
            found = containers(type(leaf).__name__, leaf, seen, DEEPEST)
            yield from ((what, each) for what, each in found if not isinstance(each, tuple))


def tensors_of(arguments: Any) -> list[Tensor]:
    """The tensors that a call is given, also in objects."""
    leaves = tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if all(map(is_simple, leaves)):  # most often, and all that torch.compile can follow
        return tensors
    held = (contents_of(each) for _, each in objects_in(arguments))
    inner = (value for each in held for value in (each.values() if isinstance(each, dict) else each))
    return [*tensors, *(value for value in inner if isinstance(value, Tensor))]


def is_simple(value: Any) -> bool:
    """Whether a value holds no others."""
    return isinstance(value, Tensor | int | float | str | None)


def itself(leaf: Any) -> Any:
    return leaf


@contextmanager
def inputs_kept(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Around a forward pass that is to be computed again from the same inputs.

    Raises:
        Incompatible: it has changed one of them in place.
    """
    tensors = [tensor for tensor in tensors_of(inputs) if not tensor.is_inference()]
    versions = [version_of(tensor) for tensor in tensors]
    yield
    if versions != [version_of(tensor) for tensor in tensors]:
        raise Incompatible(
            f"{type(module).__name__} changes what it is given in place, as an activation with inplace=True at its"
            " start does, so the backward pass can't compute it again: choose ckpt=none and tile=none, or let it change"
            " a copy"
        )


@final
class Surroundings:
    """The number formats of autocast at a forward pass, for its recomputation."""

    def __init__(self, tensor: Tensor) -> None:
        self.device_type = tensor.device.type
        self.is_autocast, self.dtype = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Without its cache of converted weights: one that was made here, without a graph, would be used elsewhere."""
        return torch.autocast(self.device_type, self.dtype, self.is_autocast, cache_enabled=False)
