"""tile=mlp: the MLPs of the blocks compute their tokens in chunks.

Bekman et al., "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Token Sequences"
(2025): TiledMLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import ONCE
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.tile.mlps import MLPS, Mlps
from lowvram.knobs.tile.tokenwise import tile


@dataclass(frozen=True)
class TiledMLP(Knob):
    """The MLP of each block computes `tokens` tokens at a time, keeps only its input, and computes each chunk again in
    the backward pass."""

    tokens: int = 1024
    names: list[str] | None = None

    stage = Stage.CHECKPOINT
    band = 2e-6
    misfits = ONCE
    breaks_always = frozenset({Fact.WHOLE_CALLS})
    saves = Kind.ACTIVATIONS
    remedy = (Kind.ACTIVATIONS, 100)  # late: it saves only where a part has more than `tokens` tokens

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "tile.tokens", self.tokens, "at least 1")
        allowed = "null (the usual names) or a list of at least one name"
        require(self.names is None or bool(self.names), "tile.names", "[]", allowed)

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, STEADY_BLOCKS, *([MLPS] if self.names is None else [])})

    def apply(self, rig: Rig) -> Rig:
        mlps = rig.structure.get(Mlps() if self.names is None else Mlps(tuple(self.names)))
        allowed = "names, inside the blocks, of what computes each token from that token alone"
        require(bool(mlps), "tile.names", self.names, allowed)
        tile(rig.model, mlps, self.tokens)
        return rig
