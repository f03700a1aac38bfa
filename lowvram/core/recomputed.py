"""What the backward pass computes again: whether there will be one, marks for operators that run twice, and the
surroundings in which they ran first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

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


@final
class Surroundings:
    """Autocast and the states of random generators at a forward pass, for its recomputation."""

    def __init__(self, inputs: Sequence[Tensor], is_random: bool) -> None:
        self.device_type = inputs[0].device.type
        self.is_autocast, self.dtype = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
        )
        self.is_random = is_random
        self.cpu_state = torch.get_rng_state() if is_random else None
        has_cards = is_random and torch.cuda.is_initialized()
        self.cards, self.card_states = get_device_states(*inputs) if has_cards else ([], [])

    def autocast(self) -> AbstractContextManager[Any]:
        """Without its cache of converted weights: one that was made here, without a graph, would be used elsewhere."""
        return torch.autocast(self.device_type, self.dtype, self.is_autocast, cache_enabled=False)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside it the same number formats are in use and the same random numbers are drawn as at the forward pass."""
        with torch.random.fork_rng(self.cards, enabled=self.is_random), self.autocast():
            if self.cpu_state is not None:
                torch.set_rng_state(self.cpu_state)
                set_device_states(self.cards, self.card_states, device_type=self.device_type)
            yield
