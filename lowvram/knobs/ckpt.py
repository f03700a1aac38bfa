"""ckpt: which blocks keep no activations and recompute them in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); torch.utils.checkpoint. He and Yu, "Transcending
Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware" (2023): the compiler's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lowvram.compat.torch_compiler import set_activation_budget
from lowvram.compat.torch_modules import BatchNorm
from lowvram.compat.torch_ops import AttentionOps, schema_of
from lowvram.config.errors import require
from lowvram.core.knob import Exactness, Fact, Kind, Knob, Stage
from lowvram.core.recomputed import has_backward, is_recomputed_later
from lowvram.core.rig import Rig
from lowvram.core.segments import Contexts, Segments


@dataclass(frozen=True)
class KeepAll(Knob):
    """Every block keeps its activations."""

    stage = Stage.CHECKPOINT

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class RecomputeEvery(Knob):
    """Block i is recomputed when i % every == 0: with 1 all of them, with 2 half of them."""

    every: int = 1

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.EAGER_AUTOGRAD, Fact.BLOCKS})

    def __post_init__(self) -> None:
        require(
            self.every >= 1,
            "ckpt.every",
            self.every,
            "at least 1 (1 recomputes every block; ckpt=none recomputes none)",
        )

    def apply(self, rig: Rig) -> Rig:
        for block in rig.task.blocks(rig.model)[:: self.every]:
            recompute(block)
        return rig

    def remedies(self) -> Mapping[Kind, int]:
        return {Kind.ACTIVATIONS: 10, Kind.OTHER: 30} if self.every == 1 else {}

    def improves_on(self, in_use: Knob) -> bool:
        """Not on `CompilerBudget`, which chooses with more knowledge."""
        return in_use != self and not isinstance(in_use, CompilerBudget)


@dataclass(frozen=True)
class RecomputeChosen(Knob):
    """The blocks with these numbers are recomputed. None: a plan is to choose them; where nothing is planned, as in a
    loop of one's own, every block is."""

    blocks: list[int] | None = None

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        numbers = self.blocks or []
        allowed = "null (a plan chooses) or a list of different numbers of blocks, counted from 0"
        is_list = all(number >= 0 for number in numbers) and len(set(numbers)) == len(numbers)
        require(is_list, "ckpt.blocks", self.blocks, allowed)

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.EAGER_AUTOGRAD, Fact.BLOCKS})

    def with_blocks(self, blocks: Sequence[int]) -> Knob | None:
        return replace(self, blocks=list(blocks)) if self.blocks is None else None

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.task.blocks(rig.model)
        numbers = range(len(blocks)) if self.blocks is None else self.blocks
        allowed = f"numbers from 0 to {len(blocks) - 1}, as this model has {len(blocks)} blocks"
        require(all(number < len(blocks) for number in numbers), "ckpt.blocks", self.blocks, allowed)
        for number in numbers:
            recompute(blocks[number])
        return rig


@dataclass(frozen=True)
class RecomputeSegments(Knob):
    """Every block is recomputed, and of `segment` consecutive ones only the first keeps its input: the inputs of the
    others are computed again, too, when the backward pass reaches the segment."""

    segment: int | None = None

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        allowed = "null (the square root of the number of blocks) or at least 1 (every block keeps its input)"
        require(self.segment is None or self.segment >= 1, "ckpt.segment", self.segment, allowed)

    def needs(self) -> frozenset[Fact]:
        # The inputs of later blocks are computed when the weights of earlier ones aren't gathered.
        return frozenset({Fact.EAGER, Fact.BLOCKS, Fact.WHOLE_PARAMS})

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.task.blocks(rig.model)
        segments = Segments(self.segment or round(math.sqrt(len(blocks))), rig.task.is_random(rig.model))
        for block in blocks:
            segments.recompute(block, contexts_of(block))
        return rig


@dataclass(frozen=True)
class Selective(Knob):
    """A share of the blocks, evenly spread, keeps the results of matrix products with weights, of attention and of
    convolutions, and recomputes the cheap operators between them."""

    fraction: float = 1.0

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        allowed = "between 0 (no block) and 1 (every block)"
        require(0 <= self.fraction <= 1, "ckpt.fraction", self.fraction, allowed)

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.EAGER_AUTOGRAD, Fact.BLOCKS})

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.RETAINABLE_GRAPH})  # torch drops kept results once the backward pass has used them

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.task.blocks(rig.model)
        num_treated = math.ceil(self.fraction * len(blocks))
        for index in range(num_treated):
            keep_products(blocks[index * len(blocks) // num_treated])
        return rig


@dataclass(frozen=True)
class CompilerBudget(Knob):
    """The compiler chooses what a graph keeps for its backward pass: at most a share of what it would keep by default.

    The share is of each graph's estimated bytes. It is no bound on the peak, which may even rise when the share falls
    (pytorch#197838).
    """

    budget: float = 0.5

    stage = Stage.CHECKPOINT
    exactness = Exactness.ROUNDING
    band = 1e-5
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        allowed = "at least 0 (keep nothing) and below 1 (ckpt=none leaves the choice to the compiler)"
        require(0 <= self.budget < 1, "ckpt.budget", self.budget, allowed)

    def needs(self) -> frozenset[Fact]:
        # Recomputation would draw new random numbers, so gradients would use another dropout mask (pytorch#190758).
        return frozenset({Fact.COMPILED, Fact.NO_RANDOMNESS})

    def apply(self, rig: Rig) -> Rig:
        set_activation_budget(self.budget)
        return rig


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


ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.convolution.default,
}  # not bmm: attention's (t, t) matrix
ATTENTION = {packet.default for packet in AttentionOps.FUSED}


def keep_products(block: nn.Module) -> None:
    """Make one block keep the results of its costly operators, and recompute the others bit for bit."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    forward = block.forward

    def recomputed(*inputs: Any, **named: Any) -> Any:
        if not has_backward(block, (inputs, named)):
            return forward(*inputs, **named)
        kept = partial(create_selective_checkpoint_contexts, policy)
        context_fn = kept if torch.compiler.is_compiling() else partial(_selective_contexts, norms)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=context_fn, **named)

    block.forward = recomputed


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether one operator's results are kept. Attention with dropout is recomputed: if its result were kept, the
    recomputation wouldn't draw its random numbers, and later dropouts would draw other ones than in the forward pass.
    """
    del context
    is_costly = operator in PRODUCTS or (operator in ATTENTION and not dropout_of(operator, args, kwargs))
    is_kept = is_costly and not is_recomputed_later()
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of a call of an attention operator."""
    arguments = dict(zip([argument.name for argument in schema_of(operator).arguments], args, strict=False))
    return {"dropout_p": 0.0, **arguments, **kwargs}["dropout_p"]


def _selective_contexts(norms: list[BatchNorm]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keeping, using = create_selective_checkpoint_contexts(policy)
    return keeping, Nested(RunningStatsFrozen(norms), using)


class Nested(AbstractContextManager[None]):
    """Two nested contexts as one. Can be entered again if both can."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


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
