"""Recomputation of one block: the backward pass runs its forward pass again, as it ran first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowvram.core.recomputed import as_first_called, has_backward, inputs_kept
from lowvram.core.repeat import Repeatable


def recompute(block: nn.Module) -> None:
    """Make one block recompute its activations in the backward pass, bit for bit as they were."""
    repeatable, forward = Repeatable(block, is_checked=True), block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:  # no partial, which torch.compile silently runs eagerly
        if not has_backward(block, (inputs, named)):
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():  # recomputation inside a graph doesn't update buffers
            # Inside a `try` torch.compile (2.11 to 2.13) can't end a graph and go on after it. If it must leave code to
            # Python, as it does with nn.GRU, it so leaves this function, which then goes the eager way below.
            try:
                return checkpoint(forward, *inputs, use_reentrant=False, **named)
            except UnboundLocalError:
                raise
        keywords = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": repeatable.passes}
        with inputs_kept(block, (inputs, named)):
            return checkpoint(as_first_called(forward, inputs, named), *inputs, **keywords, **named)

    block.forward = recomputed
