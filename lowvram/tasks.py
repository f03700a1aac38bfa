"""Problems: the criterion, the repeated blocks and the head of what is trained."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config import BadInput
from lowvram.core.rig import IGNORE, Fill, Part, Task
from lowvram.data.spec import MASK, DataSpec, Modality


class ModelConfig(Protocol):
    """What a model's configuration offers (see lowvram/models)."""

    @property
    def modality(self) -> Modality | None:
        """What it reads; None: whatever the data are."""
        ...

    @property
    def description(self) -> str: ...

    def natural_shape(self) -> tuple[int, ...]: ...

    def make(self, spec: DataSpec) -> nn.Module: ...

    def call(self, model: nn.Module, inputs: Any) -> Any: ...

    def blocks_of(self, model: nn.Module, spec: DataSpec) -> list[nn.Module]: ...

    def head_of(self, model: nn.Module, spec: DataSpec) -> nn.Linear | None: ...

    def has_plain_blocks(self, model: nn.Module, spec: DataSpec) -> bool: ...

    def is_random(self, model: nn.Module) -> bool: ...

    def values(self, model: nn.Module, spec: DataSpec, seed: int) -> Fill: ...


class Problem(Task):
    """A task over a model and its data: what all of them share."""

    def __init__(self, model: ModelConfig, spec: DataSpec) -> None:
        self.model, self.spec = model, spec

    @property
    def description(self) -> str:
        """All that it is made of: two problems of one description are the same."""
        return repr((type(self).__qualname__, self.model.description, self.spec))

    def make_model(self) -> nn.Module:
        return self.model.make(self.spec)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return self.model.call(model, inputs)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self.model.blocks_of(model, self.spec)

    def head(self, model: nn.Module) -> nn.Linear | None:
        return self.model.head_of(model, self.spec)

    def has_plain_blocks(self, model: nn.Module) -> bool:
        return self.model.has_plain_blocks(model, self.spec)

    def is_random(self, model: nn.Module) -> bool:
        return self.model.is_random(model)

    def values(self, model: nn.Module, seed: int) -> Fill:
        return self.model.values(model, self.spec, seed)

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

    def num_tokens(self, part: Part) -> Tensor:
        """How many of the part's tokens are no padding (0-dim); of what has no tokens, its targets."""
        return part.inputs[MASK].sum() if self.spec.modality is Modality.LABELLED_TOKENS else self.num_targets(part)

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

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS,)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("language_modelling", self.modalities, spec)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class Classification:
    """conf/task/classification.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES, Modality.LABELLED_TOKENS)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("classification", self.modalities, spec)
        return Classifier(model, spec)


@dataclass(frozen=True)
class Auto:
    """conf/task/auto.yaml: the task that the data are for."""

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        options = (LanguageModelling(), Classification())
        return next(option for option in options if spec.modality in option.modalities).pose(model, spec)


def check_modality(option: str, wanted: tuple[Modality, ...], spec: DataSpec) -> None:
    if spec.modality not in wanted:
        allowed = f"a task over {spec.modality.value}, which the data are: leave task=auto"
        raise BadInput("task", option, allowed)
