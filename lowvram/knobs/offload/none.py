"""The neutral option of offload."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class KeepOnDevice(Knob):
    """Everything stays on the device."""

    stage = Stage.NUMERICS

    def apply(self, rig: Rig) -> Rig:
        return rig
