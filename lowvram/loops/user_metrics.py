"""eval.metrics: the user's own scores of an evaluation."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput, require
from lowvram.config.importing import import_object
from lowvram.core.ranks import num_ranks, summed
from lowvram.core.rig import Part

KEY = "eval.metrics"


class Metric(ABC):
    """One score, collected over the parts of an evaluation."""

    @abstractmethod
    def update(self, outputs: Any, part: Part) -> None: ...

    @abstractmethod
    def compute(self) -> float:
        """The score of all parts, on all ranks. A collective: all ranks must call it."""


def user_metrics(targets: Sequence[str]) -> dict[str, Metric]:
    """A new metric for each dotted name, by the last part of its name.

    Raises:
        BadInput: there is no such function or class, or a class's objects lack `update` or `compute`.
    """
    return {target.rpartition(".")[2]: made(target) for target in targets}


def made(target: str) -> Metric:
    imported = import_object(target, KEY)
    if takes_nothing(imported):
        return Collected(imported(), target)
    return MeanOverSamples(imported, target)


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments: a class, or a function that makes an object."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


@final
class MeanOverSamples(Metric):
    """A function of outputs and targets: returns a value for each sample, or one number, their mean."""

    def __init__(self, function: Callable[[Any, Any], Any], target: str) -> None:
        self.function, self.target = function, target
        self.sums = torch.zeros(2, dtype=torch.float64)  # of values, of samples

    def update(self, outputs: Any, part: Part) -> None:
        value = self.function(outputs, part.targets)
        allowed = f"a function that returns numbers, one for each sample or their mean: this returned {value!r:.80}"
        require(isinstance(value, Tensor | float | int), KEY, self.target, allowed)
        mean = torch.as_tensor(value, dtype=torch.float64, device=part.device).mean()
        self.sums = self.sums.to(part.device) + torch.stack([mean, torch.ones_like(mean)]) * part.num_samples

    def compute(self) -> float:
        total, num_samples = summed(self.sums).tolist()
        return total / num_samples


@final
class Collected(Metric):
    """An object with `update(outputs, targets)` and `compute()`, such as the metrics of torchmetrics."""

    def __init__(self, metric: Any, target: str) -> None:
        names = {*dir(metric)}
        allowed = "a function of outputs and targets, or a class whose objects have update(outputs, targets) and"
        require({"update", "compute"} <= names, KEY, target, f"{allowed} compute(): a {type(metric).__name__} has not")
        allowed = "a function: with several ranks an object must have `sync`, as those of torchmetrics have"
        require(num_ranks() == 1 or "sync" in names, KEY, target, allowed)
        self.metric: Any = metric
        self.target, self.module = target, metric if isinstance(metric, nn.Module) else nn.Identity()

    def update(self, outputs: Any, part: Part) -> None:
        self.module.to(part.device)  # torchmetrics' states are buffers
        self.metric.update(outputs, part.targets)

    def compute(self) -> float:
        value = self.metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError):
            allowed = f"a metric whose compute() returns one number: this returned {value!r:.80}"
            raise BadInput(KEY, self.target, allowed) from None
