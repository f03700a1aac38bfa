"""The base of the formats other than plain safetensors, and what they are given to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from torch import Tensor, nn

from lowvram.tasks import Problem


@final
@dataclass(frozen=True)
class Trained:
    """A trained model, plain, in fp32, on the CPU, in evaluation mode."""

    model: nn.Module
    problem: Problem
    batches: list[Any]  # inputs of a few batches, on the CPU

    def outputs(self, inputs: Any) -> Any:
        return self.problem.call(self.model, inputs)


class Format(ABC):
    """One way to write a trained model, and to load it again."""

    name: ClassVar[str] | str
    may_run_code: ClassVar[bool] = False  # when a file that somebody crafted is loaded

    @abstractmethod
    def check(self, model: nn.Module, last: Collection[Tensor]) -> None:
        """Raises BadInput if a library is missing, or if such a model can't be written so. The model may be without
        memory."""

    def check_outputs(self, outputs: Any) -> None:
        """Raises BadInput if a graph can't return what the model returns, whose tensors have no values."""
        del outputs

    @abstractmethod
    def write(self, trained: Trained, folder: Path) -> None:
        """Write the weights into the folder, which has the files that describe the model. `trained` stays as it is."""

    @abstractmethod
    def load(self, folder: Path, make_plain: Callable[[], nn.Module]) -> nn.Module:
        """What was written, on the CPU.

        Args:
            make_plain: makes the plain model; its tensors hold any values.
        """

    @abstractmethod
    def outputs(self, problem: Problem, loaded: nn.Module, inputs: Any) -> Any:
        """Call what `load` has returned on the inputs of a batch: the outputs for the problem's criterion."""


class Graph(Format):
    """A graph of operators, which is called on the inputs of a batch: a tensor, or a dictionary of tensors."""

    def outputs(self, problem: Problem, loaded: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Any:
        return loaded(inputs)
