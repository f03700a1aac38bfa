"""tile=none: whole parts at once."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class Whole(Knob):
    """Every block computes a whole part at once."""

    stage = Stage.CHECKPOINT

    def apply(self, rig: Rig) -> Rig:
        return rig
