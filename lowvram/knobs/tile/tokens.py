"""tile=tokens: the blocks compute a few tokens of each sample at a time (token_run.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import ONCE
from lowvram.core.probes.separate_samples import SEPARATE_SAMPLES
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.tile.causal import CAUSAL_BLOCKS, CausalBlocks, tile_all
from lowvram.knobs.tile.tokenwise import OutsideBlocks, tile


@dataclass(frozen=True)
class TiledTokens(Knob):
    """Each block computes `tokens` tokens of each sample at a time, attention between these and all before them
    included, keeps only its inputs, and computes them again in the backward pass. So do norms outside of the blocks."""

    tokens: int = 1024

    stage = Stage.CHECKPOINT
    band = 2e-6
    misfits = ONCE
    saves = Kind.ACTIVATIONS
    needs_always = frozenset({Fact.EAGER, Fact.WHOLE_SAMPLES, BLOCKS, STEADY_BLOCKS, SEPARATE_SAMPLES, CAUSAL_BLOCKS})
    breaks_always = frozenset({Fact.WHOLE_CALLS, Fact.COMPILED})
    remedy = (Kind.ACTIVATIONS, 120)  # the last: keys and values are computed a third time

    def __post_init__(self) -> None:
        require(self.tokens >= 2, "tile.tokens", self.tokens, "at least 2")

    def apply(self, rig: Rig) -> Rig:
        outside, verdict = rig.structure.get(OutsideBlocks()), rig.structure.get(CausalBlocks())
        tile_all(rig.model, verdict.blocks, self.tokens)
        verdict.tell(rig.model)
        tile(rig.model, outside, self.tokens, of_each_sample=True)
        return rig
