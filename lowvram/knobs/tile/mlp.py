"""tile=mlp: the MLPs of the blocks compute their tokens in chunks.

Bekman et al., "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Token Sequences"
(2025): TiledMLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Signature, signature
from typing import final

from torch import Tensor

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import ONCE
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.repeat import Repeatable
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.tile.chunks import Chunks, Inner, in_chunks
from lowvram.knobs.tile.mlps import MLPS, Mlps, token_dim


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
        for name, method in mlps:
            owner = rig.model.get_submodule(name)
            setattr(owner, method, Tiled(Inner(Repeatable(owner), getattr(owner, method)), self.tokens))
        return rig


@final
@dataclass(frozen=True, eq=False)
class Tiled:
    """An MLP that computes its tokens in chunks. With at most `tokens` tokens it is as it was."""

    inner: Inner
    tokens: int

    @property
    def __signature__(self) -> Signature:
        """That of the MLP: transformers counts the parameters of a BERT's `feed_forward_chunk`."""
        return signature(self.inner.call)

    def __call__(self, *inputs: Tensor) -> Tensor:
        dim = token_dim(inputs[0])
        length, num_tokens = inputs[0].shape[dim], inputs[0][..., 0].numel()
        if num_tokens <= self.tokens:
            return self.inner.call(*inputs)
        chunks = Chunks(dim, max(1, self.tokens * length // num_tokens))
        return in_chunks(self.inner, chunks, inputs)
