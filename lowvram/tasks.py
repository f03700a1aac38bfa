"""Problems: the criterion, the repeated blocks and the head of what is trained."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config import BadInput
from lowvram.core.rig import IGNORE, Part, Task
from lowvram.data.spec import DataSpec, Modality


class ModelConfig(Protocol):
    """What a model's configuration offers (see lowvram/models)."""

    modality: ClassVar[Modality]

    def natural_shape(self) -> tuple[int, ...]: ...

    def make(self, spec: DataSpec) -> nn.Module: ...


class Problem(Task):
    """A task over one of our models: what all of them share."""

    def __init__(self, model: ModelConfig, spec: DataSpec) -> None:
        self.model, self.spec = model, spec

    @property
    def description(self) -> str:
        """All that it is made of: two problems of one description are the same."""
        return repr((type(self).__qualname__, self.model, self.spec))

    def make_model(self) -> nn.Module:
        return self.model.make(self.spec)

    def blocks(self, model: Any) -> list[nn.Module]:
        return model.repeated_blocks()

    def head(self, model: Any) -> nn.Linear | None:
        return model.head

    def initialise(self, model: Any, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        model.initialise(name, tensor, generator)

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        """Sum of the cross-entropies in nats. outputs (..., classes); targets (...), `IGNORE` where nothing counts."""
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        # Not cross_entropy on a copy in fp32: on CUDA, log_softmax writes fp32 from fp16 logits in one go. Of bf16 ones
        # torch (2.13) makes that copy itself; plain cross_entropy would spare it, but round probabilities to bf16.
        log_probabilities = F.log_softmax(outputs, -1, dtype=dtype).flatten(0, -2)
        return F.nll_loss(log_probabilities, part.targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_correct(self, outputs: Tensor, part: Part) -> Tensor:
        """How many targets are the likeliest class (0-dim)."""
        return (outputs.argmax(-1) == part.targets).sum()

    @abstractmethod
    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        """What an evaluation says besides its mean loss."""


class LanguageModel(Problem):
    """Each token is predicted from those before it."""

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()), "accuracy": accuracy}


class Classifier(Problem):
    """Each sample has one class."""

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy}


@dataclass(frozen=True)
class LanguageModelling:
    """conf/task/language_modelling.yaml"""

    modality: ClassVar[Modality] = Modality.TOKENS

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("language_modelling", self.modality, model)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class Classification:
    """conf/task/classification.yaml"""

    modality: ClassVar[Modality] = Modality.IMAGES

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("classification", self.modality, model)
        return Classifier(model, spec)


@dataclass(frozen=True)
class Auto:
    """conf/task/auto.yaml: the task that the model is for."""

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        problem = {Modality.TOKENS: LanguageModelling, Modality.IMAGES: Classification}[model.modality]
        return problem().pose(model, spec)


def check_modality(option: str, wanted: Modality, model: ModelConfig) -> None:
    if model.modality is not wanted:
        allowed = f"a task over {model.modality.value}, which this model reads: leave task=auto"
        raise BadInput("task", option, allowed)
