"""Every block computes, for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@final
@dataclass(frozen=True)
class EveryBlock(Knob):
    """Every block computes in every step, for every sample."""

    stage = Stage.BUILD
    searched = False

    def apply(self, rig: Rig) -> Rig:
        return rig
