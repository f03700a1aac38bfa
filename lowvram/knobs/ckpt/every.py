"""Blocks are recomputed at even distances.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.misfits import AGAIN
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.ckpt.chosen import RecomputeChosen, recompute
from lowvram.knobs.ckpt.compiler import CompilerBudget


@dataclass(frozen=True)
class KeepAll(Neutral):
    """Every block keeps its activations."""

    stage = Stage.CHECKPOINT


@dataclass(frozen=True)
class RecomputeEvery(Knob):
    """Block i is recomputed when i % every == 0: with 1 all of them, with 2 half of them."""

    every: int = 1

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS
    misfits = AGAIN
    needs_always = frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, STEADY_BLOCKS})

    def __post_init__(self) -> None:
        require(
            self.every >= 1,
            "ckpt.every",
            self.every,
            "at least 1 (1 recomputes every block; ckpt=none recomputes none)",
        )

    def apply(self, rig: Rig) -> Rig:
        for block in rig.structure.blocks[:: self.every]:
            recompute(block)
        return rig

    def remedies(self) -> Mapping[Kind, int]:
        return {Kind.ACTIVATIONS: 10, Kind.OTHER: 30} if self.every == 1 else {}

    def improves_on(self, in_use: Knob) -> bool:
        """Not on options that choose with more knowledge."""
        return in_use != self and not isinstance(in_use, CompilerBudget | RecomputeChosen)
