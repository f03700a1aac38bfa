"""Nothing is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class KeepAll(Knob):
    """Every block keeps its activations."""

    stage = Stage.CHECKPOINT

    def apply(self, rig: Rig) -> Rig:
        return rig
