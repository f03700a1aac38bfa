"""The blocks that a plan chooses, or the user, are recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import AGAIN
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.recomputed import as_first_called, has_backward, inputs_kept
from lowvram.core.repeat import Repeatable
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS


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


@dataclass(frozen=True)
class RecomputeChosen(Knob):
    """The blocks with these numbers are recomputed. None: a plan is to choose them; where nothing is planned, as in a
    loop of one's own, every block is."""

    blocks: list[int] | None = None

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS
    misfits = AGAIN
    needs_always = frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, STEADY_BLOCKS})

    def __post_init__(self) -> None:
        numbers = self.blocks or []
        allowed = "null (a plan chooses) or a list of different numbers of blocks, counted from 0"
        is_list = all(number >= 0 for number in numbers) and len(set(numbers)) == len(numbers)
        require(is_list, "ckpt.blocks", self.blocks, allowed)

    def left_to_plan(self) -> str | None:
        return "blocks" if self.blocks is None else None

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.structure.blocks
        numbers = range(len(blocks)) if self.blocks is None else self.blocks
        allowed = f"numbers from 0 to {len(blocks) - 1}, as this model has {len(blocks)} blocks"
        require(all(number < len(blocks) for number in numbers), "ckpt.blocks", self.blocks, allowed)
        for number in numbers:
            recompute(blocks[number])
        return rig
