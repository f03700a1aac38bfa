"""depth=none, and a stepper that prepares each step, given its number: what a step draws follows from that and the seed
alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from lowvram.core.knob import Neutral, Stage
from lowvram.core.stepper import Stepper, StepperAround, Update


@final
class EachStep(StepperAround):
    """Calls `prepare` with the number of the step, from 0, before the step begins. Steps without an update count."""

    def __init__(self, inner: Stepper, prepare: Callable[[int], None]) -> None:
        super().__init__(inner)
        self.prepare, self.step = prepare, 0

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.prepare(self.step)
        self.inner.begin(num_parts, divisor)

    def update(self) -> Update:
        update = self.inner.update()
        self.step += 1  # afterwards: an update that fails is no step
        return update

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.step = state["step"]


@final
@dataclass(frozen=True)
class EveryBlock(Neutral):
    """Every block computes in every step, for every sample."""

    stage = Stage.BUILD
    searched = False
