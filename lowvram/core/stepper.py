"""The stepper: what takes gradients and changes weights, as one object that steps don't look into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class GradientSink(ABC):
    """Adds to the sum of one parameter's gradients. It may be used only in the backward pass in which it was offered.

    Args:
        row_multiple: each run of rows begins at a multiple of this number.
    """

    def __init__(self, row_multiple: int) -> None:
        self.row_multiple = row_multiple

    @abstractmethod
    def add(self, rows: slice, piece: Tensor) -> None:
        """Add these rows of a gradient: contiguous, on the parameter's device."""

    def rows_at_a_time(self, most: int) -> int:
        """The length of runs that begin at such multiples: at most `most`, if that is possible."""
        return max(self.row_multiple, most - most % self.row_multiple)


SinkOf = Callable[[Tensor], GradientSink | None]  # None: the whole gradient is needed


def no_sink(parameter: Tensor) -> None:
    """For parameters whose whole gradients are needed."""


class Update(NamedTuple):
    """The result of one update."""

    grad_norm: Tensor  # global, before clipping; 0-dim
    applied: bool  # False: a gradient was not finite; unless the stepper says otherwise, no weight was changed
    recoverable: bool = False  # not applied because a loss scale was too large; the next step tries a smaller one
    skipped: bool = False  # not applied, and undone: as if the step's batch had not been there


class Stepper(ABC):
    """Owns the backward passes and the update of one step."""

    @abstractmethod
    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        """Begin a step of `num_parts` backward calls, whose gradients will be `divisor` times too large.

        A `divisor` that is a tensor (0-dim), whatever its value, is a loss scale: a step whose gradients are not finite
        must change no weight. With the plain 1.0 such a step ends the run.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one part."""

    def rest(self, compute: Callable[[], None]) -> None:
        """Compute gradients that the backward pass of a part has left for later."""
        compute()

    def sink_of(self, parameter: Tensor) -> GradientSink | None:
        """Where the running backward pass may add the parameter's gradient a few rows at a time; None if the whole
        gradient is needed."""
        del parameter
        return None

    @abstractmethod
    def update(self) -> Update:
        """Use the gradients of the step and free them."""

    @abstractmethod
    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Free what is kept for these parameters between steps, apart from their weights: the next steps don't train
        them. Called between two steps."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""

    def figures(self) -> Mapping[str, float]:
        """What the stepper did, for a run's row: numbers by their dotted paths there. A stepper around another one adds
        its own to the inner one's."""
        return {"precision.skipped_steps": 0}

    def remark(self) -> str | None:
        """One sentence if a run has ended otherwise than the knobs' caveats say, else None."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class StepperAround(Stepper):
    """A stepper around another one; passes every call on to it."""

    def __init__(self, inner: Stepper) -> None:
        self.inner = inner

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.inner.begin(num_parts, divisor)

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)

    def rest(self, compute: Callable[[], None]) -> None:
        self.inner.rest(compute)

    def sink_of(self, parameter: Tensor) -> GradientSink | None:
        return self.inner.sink_of(parameter)

    def update(self) -> Update:
        return self.inner.update()

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        self.inner.forget(parameters)

    def set_lr(self, lr: float) -> None:
        self.inner.set_lr(lr)

    def figures(self) -> Mapping[str, float]:
        return self.inner.figures()

    def remark(self) -> str | None:
        return self.inner.remark()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
