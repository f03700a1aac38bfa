"""Gradients that are added to the sum of a step a few rows at a time, so that the whole gradient never exists.

A stepper that sums the gradients of a step's parts offers a sink (`Stepper.sink_of`), and what computes the gradient of
a large weight may use it. Whoever adds all of a gradient's rows to the sink returns no gradient to autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


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
