"""bf16_split: weights, gradients and activations in bf16; the optimizer holds what bf16 drops of each weight.

FlashOptim (2026), arXiv 2602.23349.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rounding import Rounding, Split
from lowvram.knobs.precision.bf16_pure import Bf16Weights


@final
@dataclass(frozen=True)
class Bf16Split(Bf16Weights):
    """A weight and its correction together are a number of 24 or 32 bits: updates don't get lost, and have no noise."""

    correction_bits: int = 8

    def __post_init__(self) -> None:
        require(self.correction_bits in (8, 16), "precision.correction_bits", self.correction_bits, "8 or 16")

    def needs(self) -> frozenset[Fact | ModelFact]:
        return super().needs() | {STEADY_WEIGHTS}  # who writes into a weight knows nothing of its correction

    def breaks(self) -> frozenset[Fact]:
        return super().breaks() | {Fact.UNSPLIT_WEIGHTS}

    def rounding(self) -> Rounding:
        return Split(self.correction_bits)
