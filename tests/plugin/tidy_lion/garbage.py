"""garbage: when Python looks for objects that only hold each other. They may hold tensors."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from itertools import count

from lowvram.config.errors import require
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig


class Garbage(Knob):
    """The base of this group's options."""

    group_name = "garbage"
    stage = Stage.PROCESS
    searched = False


@dataclass(frozen=True)
class WhenPythonLikes(Garbage):
    """As Python does by itself."""

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class EverySteps(Garbage):
    """After every `every` updates."""

    every: int = 10

    def __post_init__(self) -> None:
        require(self.every >= 1, "garbage.every", self.every, "at least 1 update")

    def apply(self, rig: Rig) -> Rig:
        steps = count(1)

        def finish() -> None:
            rig.finish()
            if next(steps) % self.every == 0:
                gc.collect()

        return replace(rig, finish=finish)
