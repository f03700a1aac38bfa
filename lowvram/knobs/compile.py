"""compile: whether the model is compiled, and how much of it at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class Eager(Knob):
    """The model runs eagerly."""

    stage = Stage.COMPILE

    def apply(self, rig: Rig) -> Rig:
        return rig
