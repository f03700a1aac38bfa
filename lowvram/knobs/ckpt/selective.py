"""Costly operators keep their results, cheap ones are recomputed."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowvram.compat.torch_compiler import is_making_graph
from lowvram.compat.torch_ops import AttentionOps, schema_of
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.fused import COSTLY
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import AGAIN
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.recomputed import as_first_called, has_backward, inputs_kept, is_recomputed_later
from lowvram.core.repeat import Repeatable
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.ckpt.kept import Keeping, Kept, Using


@dataclass(frozen=True)
class Selective(Knob):
    """A share of the blocks, evenly spread, keeps the results of matrix products with weights, of attention and of
    convolutions, and recomputes the cheap operators between them."""

    fraction: float = 1.0

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS
    misfits = AGAIN
    needs_always = frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, STEADY_BLOCKS})

    def __post_init__(self) -> None:
        allowed = "between 0 (no block) and 1 (every block)"
        require(0 <= self.fraction <= 1, "ckpt.fraction", self.fraction, allowed)

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.structure.blocks
        num_treated = math.ceil(self.fraction * len(blocks))
        for index in range(num_treated):
            keep_products(blocks[index * len(blocks) // num_treated])
        return rig


ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.convolution.default,
}  # not bmm: attention's (t, t) matrix
ATTENTION = {packet.default for packet in AttentionOps.FUSED}


def keep_products(block: nn.Module) -> None:
    """Make one block keep the results of its costly operators, and recompute the others bit for bit."""
    repeatable, forward = Repeatable(block, is_checked=True), block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:
        if not has_backward(block, (inputs, named)):
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():
            try:  # as chosen.py says
                return checkpoint(forward, *inputs, use_reentrant=False, context_fn=compiled_contexts, **named)
            except UnboundLocalError:
                raise
        context_fn = partial(contexts, repeatable)
        keywords = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": context_fn}
        with inputs_kept(block, (inputs, named)):
            return checkpoint(as_first_called(forward, inputs, named), *inputs, **keywords, **named)

    block.forward = recomputed


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`is_kept`, in a compiled block."""
    del context
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one operator's results are kept. Attention with dropout is recomputed: if its result were kept, the
    recomputation wouldn't draw its random numbers, and later dropouts would draw other ones than in the forward pass.
    """
    is_attention = operator in ATTENTION and not dropout_of(operator, args, kwargs)
    is_costly = is_attention or operator in PRODUCTS or operator in COSTLY
    return is_costly and not is_recomputed_later()


def dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of a call of an attention operator."""
    arguments = dict(zip([argument.name for argument in schema_of(operator).arguments], args, strict=False))
    return {"dropout_p": 0.0, **arguments, **kwargs}["dropout_p"]


def contexts(repeatable: Repeatable) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Those around a block's forward pass, and around its recomputation."""
    passes, kept = repeatable.passes(), Kept()
    return Nested(passes.first, Keeping(kept, is_kept)), Nested(passes.again, Using(kept))


def compiled_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The same in a compiled model: torch's own while a graph is made. Code that torch.compile leaves to Python, as it
    does with nn.GRU, runs eagerly within them, and torch's would keep what its kernels change in place."""
    if is_making_graph():
        return create_selective_checkpoint_contexts(policy)
    kept = Kept()
    return Keeping(kept, is_kept), Using(kept)


class Nested(AbstractContextManager[None]):
    """Two nested contexts as one. Can be entered again if both can."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.inner.__exit__(*error)
        finally:
            self.outer.__exit__(*error)
