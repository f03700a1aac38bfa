"""ckpt: which blocks keep no activations and compute them again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); torch.utils.checkpoint. He and Yu, "Transcending
Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware" (2023): the compiler's choice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lowvram.config import require
from lowvram.core.knob import Exactness, Fact, Kind, Knob, Stage
from lowvram.core.rig import Rig


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
        return frozenset({Fact.EAGER_AUTOGRAD})

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


@dataclass(frozen=True)
class CompilerBudget(Knob):
    """The compiler chooses what a graph keeps for its backward pass, at most a share of what it would like to keep.

    The share is of estimated bytes of each graph, and no bound on the peak, which may even rise when the share falls
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
        # Random numbers would be drawn anew, so that gradients are of another dropout mask (pytorch#190758).
        return frozenset({Fact.COMPILED, Fact.NO_RANDOMNESS})

    def apply(self, rig: Rig) -> Rig:
        functorch_config.activation_memory_budget = self.budget
        return rig


def recompute(block: nn.Module) -> None:
    """Make one block recompute its activations in the backward pass, bit for bit as they were."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    context_fn = partial(_contexts, norms) if norms else noop_context_fn
    forward = block.forward

    def recomputed(*inputs: Any) -> Any:  # a function: torch.compile would leave a partial eager, in silence
        if torch.compiler.is_compiling():  # what a graph computes again has no effect on buffers
            return checkpoint(forward, *inputs, use_reentrant=False)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=context_fn)

    block.forward = recomputed


def _contexts(norms: list[_BatchNorm]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), StatisticsHeld(norms)


class StatisticsHeld:
    """Inside it a forward pass leaves BatchNorm's running statistics alone: stock checkpointing updates them twice
    (pytorch#96136). A class, because a second backward pass enters it again."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
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
