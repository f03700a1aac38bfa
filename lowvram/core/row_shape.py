"""How the ranks of a point share out a model: which dimensions the mesh of all ranks has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

PIPELINE, DATA, CONTEXT, TENSOR = "pp", "dp", "cp", "tp"  # as torchtitan calls them, in this order


@final
@dataclass(frozen=True)
class RowShape:
    """How many ranks a row has, which compute the same samples: the product of the numbers among which they share out
    the blocks, the tokens of a sample, and the features of a layer.

    Args:
        own_tokens: whether ranks that split layers share out the tokens, too, wherever no layer is split.
    """

    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    own_tokens: bool = False

    @property
    def size(self) -> int:
        return self.pipeline * self.context * self.tensor

    def num_rows(self, num_ranks: int) -> int:
        """How many rows so many ranks are, among which a logical batch is shared out."""
        return num_ranks // self.size

    def over(self, num_ranks: int) -> dict[str, int]:
        """The dimensions of the mesh of all ranks, those of the row only where it has several ranks."""
        rows = self.num_rows(num_ranks)
        sizes = {PIPELINE: self.pipeline, DATA: rows, CONTEXT: self.context, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == DATA}


ALONE = RowShape()  # each rank has the whole model
