"""What the backward pass computes again: whether there will be one, marks for operators that run twice, and the
surroundings in which they ran first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.errors import Incompatible

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
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def as_first_called(forward: Forward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Forward:
    """`forward` for a call with these arguments, and for its recomputations. These get lists and dictionaries as they
    were when the first call began: between the two, the model may add to them what the block returned."""
    if not any(isinstance(value, list | dict | tuple) for value in (*inputs, *named.values())):
        return forward
    kept, is_first = tree_map(itself, (inputs, named)), [True]

    def call(*inputs: Any, **named: Any) -> Any:
        if is_first:
            is_first.clear()
            return forward(*inputs, **named)
        inputs, named = tree_map(itself, kept)  # other lists each time: the block may change them
        return forward(*inputs, **named)

    return call


def itself(leaf: Any) -> Any:
    return leaf


@contextmanager
def inputs_kept(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Around a forward pass that is to be computed again from the same inputs.

    Raises:
        Incompatible: it has changed one of them in place.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.is_inference()]
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

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.device_type = inputs[0].device.type
        self.is_autocast, self.dtype = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Without its cache of converted weights: one that was made here, without a graph, would be used elsewhere."""
        return torch.autocast(self.device_type, self.dtype, self.is_autocast, cache_enabled=False)
