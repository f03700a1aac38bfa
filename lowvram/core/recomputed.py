"""What the backward pass computes again: whether there will be one, and marks for operators that run twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves

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


def has_backward(module: nn.Module, inputs: Any) -> bool:
    """Whether a call of the module with these inputs, in any nesting, gets a backward pass. Without one there is
    nothing to recompute, and torch.compile may fail on it."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))
