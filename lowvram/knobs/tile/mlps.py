"""Finds the MLPs of a model's blocks: modules, or methods, that compute each token from that token alone.

Names don't tell: some models mix tokens in what they call an MLP. So one forward pass on fake tensors shows with what
shapes each is called. Then each runs on a few tokens, some of them NaN, with all its weights zero: NaN spreads to every
output that depends on it, whatever the weights. What NaN doesn't pass through, alone.py sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from lowvram.core.fact import ModelFact
from lowvram.core.structure import Probe, Structure, unless
from lowvram.knobs.tile.tokenwise import Place, tokenwise

# As the blocks of Transformers call them. The last is a method of BERT and its relatives, which have no such module.
USUAL_NAMES = ("mlp", "feed_forward", "ffn", "DenseReluDense", "block_sparse_moe", "feed_forward_chunk")


@final
@dataclass(frozen=True)
class Mlps(Probe[tuple[Place, ...]]):
    """The MLPs of the blocks: what maps tensors (samples, tokens, ..., width) to one such tensor, each token by itself.
    Empty if they aren't known.

    Args:
        names: of the modules or methods, as the blocks call them.
    """

    names: tuple[str, ...] = USUAL_NAMES

    def find(self, known: Structure) -> tuple[Place, ...]:
        name_of = {module: name for name, module in known.model.named_modules()}
        places = [place for block in known.blocks for place in named(block, name_of[block], self.names)]
        return tokenwise(places, known)


MLPS = ModelFact(
    "the task knows the MLPs of the model's blocks",
    unless(
        lambda known: known.get(Mlps()),
        "none were found: leave tile=none or, if they have unusual names, list those in tile.names",
    ),
)


def named(module: nn.Module, name: str, names: Sequence[str]) -> Iterator[Place]:
    """The outermost modules below `module`, and methods of it and of those, that have one of the names."""
    for method in names:
        if callable(getattr(type(module), method, None)):
            yield name, method
            return
    for child_name, child in module.named_children():
        dotted = f"{name}.{child_name}".removeprefix(".")
        if child_name in names:
            yield dotted, "forward"
        else:
            yield from named(child, dotted, names)
