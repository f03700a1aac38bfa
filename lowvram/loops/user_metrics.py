"""eval.metrics: the user's own scores of an evaluation."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autocast import same_autocast
from lowvram.compat.torch_trees import tree_flatten, tree_unflatten
from lowvram.config.errors import BadInput, require
from lowvram.config.importing import import_object
from lowvram.core.mesh import data_ranks, ranks_along, ranks_with_outputs
from lowvram.core.rig import Part
from lowvram.core.row_shape import PIPELINE

KEY = "eval.metrics"


class Metric(ABC):
    """One score, collected over the parts of an evaluation. The user's code sees copies, and what it switches ends with
    it, so that it can change neither the loss nor the training."""

    @final
    def update(self, outputs: Any, part: Part) -> None:
        with same_autocast():
            self.add(copied(outputs), copied(part.targets), part.num_samples)

    @final
    def compute(self) -> float:
        """The score of all parts, on all ranks. A collective: all ranks must call it."""
        with same_autocast():
            return self.score()

    @abstractmethod
    def add(self, outputs: Any, targets: Any, num_samples: int) -> None:
        """Count the samples of one part."""

    @abstractmethod
    def score(self) -> float:
        """The score of all parts, on all ranks."""


def copied(tree: Any) -> Any:
    """The same with tensors of its own; what torch can't take apart is copied whole."""
    leaves, structure = tree_flatten(tree)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf) for leaf in leaves]
    return tree_unflatten(copies, structure)


def user_metrics(targets: Sequence[str], device: torch.device) -> dict[str, Metric]:
    """A new metric for each dotted name, by the last part of its name. Its tensors are on `device` from the start, as a
    rank without samples takes part in the sum of all ranks.

    Raises:
        BadInput: there is no such function or class, or a class's objects lack `update` or `compute`.
    """
    return {target.rpartition(".")[2]: made(target, device) for target in targets}


def made(target: str, device: torch.device) -> Metric:
    imported = import_object(target, KEY)
    if takes_nothing(imported):
        return Collected(imported(), target, device)
    return MeanOverSamples(imported, target, device)


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments: a class, or a function that makes an object."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it takes arguments, or has no signature, as some functions of C
        return False
    return True


@final
class MeanOverSamples(Metric):
    """A function of outputs and targets: returns a value for each sample, or one number, their mean."""

    def __init__(self, function: Callable[[Any, Any], Any], target: str, device: torch.device) -> None:
        self.function, self.target = function, target
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # of values, of samples

    def add(self, outputs: Any, targets: Any, num_samples: int) -> None:
        value = self.function(outputs, targets)
        if not isinstance(value, Tensor | float | int):
            raise unusable(self.target, "a function that returns numbers, one for each sample or their mean", value)
        mean = torch.as_tensor(value, dtype=torch.float64, device=self.sums.device).mean()
        self.sums = self.sums + torch.stack([mean, torch.ones_like(mean)]) * num_samples

    def score(self) -> float:
        total, num_samples = ranks_with_outputs().sum(self.sums).tolist()
        return total / num_samples


@final
class Collected(Metric):
    """An object with `update(outputs, targets)` and `compute()`, such as the metrics of torchmetrics."""

    def __init__(self, metric: Any, target: str, device: torch.device) -> None:
        names = {*dir(metric)}
        allowed = "a function of outputs and targets, or a class whose objects have update(outputs, targets) and"
        require({"update", "compute"} <= names, KEY, target, f"{allowed} compute(): a {type(metric).__name__} has not")
        allowed = "a function: with several ranks an object must have `sync`, as those of torchmetrics have"
        require(data_ranks().size == 1 or "sync" in names, KEY, target, allowed)
        allowed = "a function: with sharding=pipeline the last stage alone has outputs"
        require(ranks_along(PIPELINE) is None, KEY, target, allowed)
        self.metric: Any = metric.to(device) if isinstance(metric, nn.Module) else metric  # torchmetrics' states
        self.target = target

    def add(self, outputs: Any, targets: Any, num_samples: int) -> None:
        self.metric.update(outputs, targets)

    def score(self) -> float:
        value = self.metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError):
            raise unusable(self.target, "a metric whose compute() returns one number", value) from None


def unusable(target: str, allowed: str, value: Any) -> RuntimeError:
    """The error of a metric that fails in an evaluation. It is no BadInput: a refused run leaves no row and can't be
    resumed, and steps have been trained by now."""
    return RuntimeError(str(BadInput(KEY, target, f"{allowed}: this returned {value!r:.80}")))
