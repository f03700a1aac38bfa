"""The base of the configurations of lowvram's own models, which know their blocks and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from lowvram.core.seeds import generator_for
from lowvram.data.spec import IDS, POSITIONS, DataSpec, Modality, TextRules
from lowvram.models import layout


class OwnModel:
    """The configuration of a model that names its repeated blocks and its head, and fills each tensor from a random
    generator of its own."""

    dropout: float

    @property
    def description(self) -> str:
        """Everything that defines the model, as text: models with the same description are the same."""
        return repr(self)

    @property
    def text_rules(self) -> TextRules:
        """What the model requires of texts: nothing."""
        return TextRules()

    def check_packed(self) -> None:
        """Raises nothing: these models keep packed sequences of a row apart."""

    def reading(self, modality: Modality) -> Self:
        """This configuration, as its kind of data is fixed."""
        return self

    def call(self, model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        return model(inputs[IDS], inputs[POSITIONS]) if isinstance(inputs, Mapping) else model(inputs)

    def blocks_of(self, model: Any, spec: DataSpec) -> list[nn.Module]:
        return model.repeated_blocks()

    def head_of(self, model: Any, spec: DataSpec) -> nn.Linear | None:
        return model.head

    def has_plain_blocks(self, model: nn.Module, spec: DataSpec) -> bool:
        return True

    def is_random(self, model: nn.Module) -> bool:
        return self.dropout > 0

    @property
    def base(self) -> str | None:
        """None: no pretrained weights."""
        return None

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None:
        layout.save(model, self, spec, folder)

    def values(self, model: Any, spec: DataSpec, seed: int) -> Callable[[str, Tensor], None]:
        return lambda name, tensor: model.initialise(name, tensor, generator_for(seed, name, tensor.device))
