"""What lowvram asks of the configuration of a model, whoever wrote the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import nn

from lowvram.core.structure import Stating
from lowvram.core.values import Fill
from lowvram.data.spec import DataSpec, Modality, TextRules


class ModelConfig(ABC):
    """The configuration of a model: a frozen dataclass, whose fields are those of the model's YAML."""

    @property
    @abstractmethod
    def modality(self) -> Modality | None:
        """What kind of data the model reads; None: any."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Everything that defines the model, as text: models with the same description are the same."""

    @abstractmethod
    def natural_shape(self) -> tuple[int, ...]:
        """The shape of a sample when the data does not say."""

    @property
    def text_rules(self) -> TextRules:
        """What the model requires of texts: nothing, or that isn't known."""
        return TextRules()

    @abstractmethod
    def check_packed(self) -> None:
        """Raises BadInput if the model doesn't keep the sequences of a row apart. One that does takes their positions
        in `call`."""

    def reading(self, modality: Modality) -> ModelConfig:
        """The configuration for this kind of data, if the model can read several."""
        del modality
        return self

    @abstractmethod
    def make(self, spec: DataSpec) -> nn.Module:
        """The model for these data. Its tensors hold no values yet.

        Raises:
            BadInput: the model can't be made, or not for such data.
        """

    @abstractmethod
    def call(self, model: nn.Module, inputs: Any) -> Any:
        """The model's logits."""

    @abstractmethod
    def stated(self) -> Stating:
        """What is known of the model without a trial."""

    @abstractmethod
    def values(self, model: nn.Module, spec: DataSpec, seed: int) -> Fill:
        """Fills the model's tensors with their first values."""

    @property
    def base(self) -> str | None:
        """The folder or hub name of the pretrained weights that the model starts with; None if there are none."""
        return None

    @abstractmethod
    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None:
        """Write the model so that it can be loaded without the run that trained it."""

    def save_companions(self, folder: Path) -> None:
        """Write the files that belong to the model and hold no weights, such as a tokenizer's; here none."""
        del folder
