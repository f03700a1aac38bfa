"""Recomputation of one block, with the running statistics of its BatchNorms as the first forward pass left them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.core.recomputed import has_backward
from lowvram.core.segments import Contexts


def recompute(block: nn.Module) -> None:
    """Make one block recompute its activations in the backward pass, bit for bit as they were."""
    context_fn, forward = contexts_of(block), block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:  # no partial, which torch.compile silently runs eagerly
        if not has_backward(block, (inputs, named)):
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():  # recomputation inside a graph doesn't update buffers
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=context_fn, **named)

    block.forward = recomputed


def contexts_of(block: nn.Module) -> Contexts:
    """The contexts around a block's forward pass, and around its recomputation."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    return partial(_contexts, norms) if norms else noop_context_fn


def _contexts(norms: list[BatchNorm]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), RunningStatsFrozen(norms)


class RunningStatsFrozen:
    """Inside it a forward pass doesn't change BatchNorm's running statistics. Without it, recomputation would update
    them a second time (pytorch#96136). Can be entered again, as a second backward pass does."""

    def __init__(self, norms: list[BatchNorm]) -> None:
        self.norms = norms
        self.held: list[tuple[float | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self.held = [(norm.momentum, _copy(norm.num_batches_tracked)) for norm in self.norms]
        for norm in self.norms:
            norm.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, num_batches) in zip(self.norms, self.held, strict=True):
            norm.momentum = momentum
            if num_batches is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(num_batches)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
