"""The phases of a step: `with_phases` wraps a rig so that it marks where each begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from torch import Tensor

from lowvram.core.rig import Part, Rig
from lowvram.core.stepper import Stepper, StepperAround, Update

BETWEEN = "between"


class Marks(ABC):
    """Receives the phases "forward", "backward", "weights" and "update" as they begin."""

    @abstractmethod
    def mark(self, label: str) -> None:
        """The phase from here to the next mark is `label`."""

    @contextmanager
    def lap(self, label: str) -> Iterator[None]:
        """The phase of the block is `label`; after it, `BETWEEN`."""
        self.mark(label)
        yield
        self.mark(BETWEEN)


def with_phases(rig: Rig, marks: Marks) -> Rig:
    """The same rig, which calls `marks` at each phase."""

    def move(part: Part) -> Part:
        marks.mark("forward")
        return rig.move(part)

    return replace(rig, move=move, stepper=MarkingStepper(rig.stepper, marks))


@final
class MarkingStepper(StepperAround):
    """Marks the backward passes, what these leave for later, and the update of the stepper inside."""

    def __init__(self, inner: Stepper, marks: Marks) -> None:
        super().__init__(inner)
        self.marks = marks

    def backward(self, loss: Tensor) -> None:
        with self.marks.lap("backward"):
            self.inner.backward(loss)

    def rest(self, compute: Callable[[], None]) -> None:
        with self.marks.lap("weights"):
            self.inner.rest(compute)

    def update(self) -> Update:
        with self.marks.lap("update"):
            return self.inner.update()
