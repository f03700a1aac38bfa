"""The blocks that a plan chooses, or the user, are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import AGAIN
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.ckpt.block import recompute


@dataclass(frozen=True)
class RecomputeChosen(Knob):
    """The blocks with these numbers are recomputed. None: a plan is to choose them; where nothing is planned, as in a
    loop of one's own, every block is."""

    blocks: list[int] | None = None

    stage = Stage.CHECKPOINT
    saves = Kind.ACTIVATIONS
    misfits = AGAIN

    def __post_init__(self) -> None:
        numbers = self.blocks or []
        allowed = "null (a plan chooses) or a list of different numbers of blocks, counted from 0"
        is_list = all(number >= 0 for number in numbers) and len(set(numbers)) == len(numbers)
        require(is_list, "ckpt.blocks", self.blocks, allowed)

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, STEADY_BLOCKS})

    def with_blocks(self, blocks: Sequence[int]) -> Knob | None:
        return replace(self, blocks=list(blocks)) if self.blocks is None else None

    def apply(self, rig: Rig) -> Rig:
        blocks = rig.structure.blocks
        numbers = range(len(blocks)) if self.blocks is None else self.blocks
        allowed = f"numbers from 0 to {len(blocks) - 1}, as this model has {len(blocks)} blocks"
        require(all(number < len(blocks) for number in numbers), "ckpt.blocks", self.blocks, allowed)
        for number in numbers:
            recompute(blocks[number])
        return rig
