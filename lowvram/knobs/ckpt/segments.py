"""Blocks and their inputs are recomputed: the input of one block in each segment is kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import AGAIN
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.rig import Rig
from lowvram.core.segments import Segments
from lowvram.core.structure import BLOCKS


@dataclass(frozen=True)
class RecomputeSegments(Knob):
    """Every block is recomputed, and of `segment` consecutive ones only the first keeps its input: the inputs of the
    others are computed again, too, when the backward pass reaches the segment."""

    segment: int | None = None

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS
    misfits = AGAIN
    # The inputs of later blocks are computed when the weights of earlier ones aren't gathered.
    needs_always = frozenset({Fact.EAGER, BLOCKS, STEADY_BLOCKS, Fact.WHOLE_PARAMS})

    def __post_init__(self) -> None:
        allowed = "null (the square root of the number of blocks) or at least 1 (every block keeps its input)"
        require(self.segment is None or self.segment >= 1, "ckpt.segment", self.segment, allowed)

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.structure.blocks
        segments = Segments(self.segment or round(math.sqrt(len(blocks))))
        for block in blocks:
            segments.recompute(block)
        return rig
