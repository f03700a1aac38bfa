"""The phases of a step: whoever wants to know where one begins wraps the rig."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, final

from torch import Tensor

from lowvram.core.rig import Part, Rig, Stepper, Update

BETWEEN = "between"


class Marks(Protocol):
    """Is told of the phases "forward", "backward" and "update"."""

    def mark(self, label: str) -> None:
        """From here to the next mark it is `label`."""

    def lap(self, label: str) -> AbstractContextManager[None]:
        """The block is `label`, what follows is nothing."""
        ...


def with_phases(rig: Rig, marks: Marks) -> Rig:
    """The same rig, telling its phases: a value like any other."""

    def forward(part: Part) -> Any:
        marks.mark("forward")
        return rig.forward(part)

    return replace(rig, forward=forward, stepper=TellingStepper(rig.stepper, marks))


@final
class TellingStepper(Stepper):
    """Tells when the inner stepper goes backward and when it updates."""

    def __init__(self, inner: Stepper, marks: Marks) -> None:
        self.inner, self.marks = inner, marks

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.inner.begin(num_parts, divisor)

    def backward(self, loss: Tensor) -> None:
        with self.marks.lap("backward"):
            self.inner.backward(loss)

    def update(self) -> Update:
        with self.marks.lap("update"):
            return self.inner.update()

    def set_lr(self, lr: float) -> None:
        self.inner.set_lr(lr)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
