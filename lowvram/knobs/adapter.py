"""adapter: which parameters train, and whether small ones are added to train in their place."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class NoAdapter(Knob):
    """The model trains whole."""

    stage = Stage.BUILD

    def apply(self, rig: Rig) -> Rig:
        return rig
