"""What the configurations of our own models share: such a model knows itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from lowvram.core.seeds import generator_for
from lowvram.data.spec import IDS, POSITIONS, DataSpec, Modality, TextRules
from lowvram.models import layout


class OwnModel:
    """A model that names its repeated blocks and its head, and whose tensors are each filled from randomness of its
    own."""

    dropout: float

    @property
    def description(self) -> str:
        """All that the model is made of: two of one description are the same."""
        return repr(self)

    @property
    def text_rules(self) -> TextRules:
        """What it asks of texts: nothing in particular."""
        return TextRules()

    def check_packed(self) -> None:
        """Those of tokens keep sequences of one row apart."""

    def reading(self, modality: Modality) -> Self:
        """Itself: it reads what it reads."""
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
        """Where others find the weights that it starts with: nowhere."""
        return None

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None:
        layout.save(model, self, spec, folder)

    def values(self, model: Any, spec: DataSpec, seed: int) -> Callable[[str, Tensor], None]:
        return lambda name, tensor: model.initialise(name, tensor, generator_for(seed, name, tensor.device))
