"""adapter=progressive: the model freezes from the bottom up while it trains.

Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers" (2017). Autograd stops at the lowest
block that trains, so those below it keep no activations either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lowvram.config.errors import require
from lowvram.knobs.adapter.over_time import Active, OverTime


@final
@dataclass(frozen=True)
class Progressive(OverTime):
    """Every `every` steps one more unit freezes for good: what comes before the blocks, then one block after another.
    The last block trains to the end, and what follows it."""

    every: int = 100
    frozen: int = 0
    most: int | None = None

    saves = None  # at the first steps the whole model trains, unless `frozen` says otherwise

    def __post_init__(self) -> None:
        require(self.every >= 1, "adapter.every", self.every, "at least 1 step")
        require(self.frozen >= 0, "adapter.frozen", self.frozen, "at least 0 units")
        allowed = f"null (all but the last block) or at least adapter.frozen={self.frozen}"
        require(self.most is None or self.most >= self.frozen, "adapter.most", self.most, allowed)

    def what_rests(self) -> str:
        return f"the model freezes from the bottom up, one block more every {self.every} steps"

    def num_frozen(self, step: int, num_blocks: int) -> int:
        """The number of units that are frozen in a step."""
        most = num_blocks if self.most is None else min(self.most, num_blocks)
        return min(self.frozen + step // self.every, most)

    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        return frozenset(range(self.num_frozen(step, num_blocks), num_blocks + 2))

    def heaviest(self, sizes: Sequence[int]) -> list[Active]:
        return [self.active(0, len(sizes) - 2, 0)]
