"""logits: how the last layer and the loss meet."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class FullLogits(Knob):
    """The logits of a part exist whole."""

    stage = Stage.LOGITS

    def apply(self, rig: Rig) -> Rig:
        return rig
