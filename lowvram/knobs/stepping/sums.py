"""Where the gradients of a step are summed and wait until they may be used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from lowvram.core.shards import SquareSum
from lowvram.core.stepper import GradientSink


class Sums(ABC):
    """The gradients of the current step, each summed over the step's parts, outside `.grad`."""

    @abstractmethod
    def begin(self, num_parts: int) -> None:
        """Forget the last step and begin one of `num_parts` parts."""

    @abstractmethod
    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradient of a parameter, or those of several small vectors, to its sum."""

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        """Where the parameter's gradient may be added a few rows at a time; None if `take` needs the whole one."""
        del parameter
        return None

    @abstractmethod
    def with_gradient(self) -> list[nn.Parameter]:
        """The parameters that have a gradient in this step, in the order in which they should be brought back."""

    @abstractmethod
    def squares(self) -> SquareSum:
        """The sum of squares of this step's gradients."""

    @abstractmethod
    def bring_back(self, parameter: nn.Parameter) -> None:
        """Set the parameter's gradient to its sum, in the parameter's layout and dtype."""

    @abstractmethod
    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Free what is kept for these parameters between steps: the next steps don't train them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the sums of the next step depend on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
