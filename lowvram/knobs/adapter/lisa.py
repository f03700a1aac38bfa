"""adapter=lisa: a few blocks, drawn anew every so many steps, train beside the embedding and the head.

Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from lowvram.core.heaviest import extremes
from lowvram.core.seeds import generator_for
from lowvram.knobs.adapter.over_time import Active, OverTime, blocks_train, check_period
from lowvram.knobs.adapter.units import BEFORE


@final
@dataclass(frozen=True)
class Lisa(OverTime):
    """`blocks` random blocks train at a time, with everything outside the blocks. All draws are equally probable, as in
    the paper."""

    blocks: int = 2
    every: int = 20

    def __post_init__(self) -> None:
        check_period(self.blocks, self.every)

    def what_rests(self) -> str:
        return f"only {blocks_train(self.blocks)} at a time, drawn anew every {self.every} steps"

    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        generator = generator_for(seed, f"lisa {step // self.every}", torch.device("cpu"))
        drawn = torch.randperm(num_blocks, generator=generator)[: self.blocks]
        return frozenset((1 + drawn).tolist()) | {BEFORE, num_blocks + 1}

    def heaviest(self, sizes: Sequence[int]) -> list[Active]:
        last = len(sizes) - 1
        return [chosen | {BEFORE, last} for chosen in extremes(range(1, last), self.blocks, sizes)]
