"""sharding: how the point is spread over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class Unsharded(Knob):
    """One process holds everything."""

    stage = Stage.SHARD

    def apply(self, rig: Rig) -> Rig:
        return rig
