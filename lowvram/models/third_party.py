"""The base of the configurations of third-party models: their code builds them, and trials find their blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import BadInput
from lowvram.core.generators import same_draws_afterwards, seed_all
from lowvram.core.model_copies import copied
from lowvram.core.outputs import all_outputs, logits_of
from lowvram.core.probes.blocks import FoundBlocks, find_blocks, outermost, repeated_classes
from lowvram.core.structure import Blocks, Stating, Structure
from lowvram.data.spec import DataSpec
from lowvram.models.config import ModelConfig

Fill = Callable[[str, Tensor], None]


class ForeignModel(ModelConfig, ABC):
    """The configuration of a third-party model."""

    blocks: str | None  # the class of the repeated blocks, if the user names it

    @abstractmethod
    def build(self, spec: DataSpec) -> nn.Module:
        """The model with its values on the CPU; random ones come from torch's generator."""

    def call(self, model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Any:
        """The model's logits. A dictionary of inputs is passed as keyword arguments."""
        return logits_of(all_outputs(model, inputs))

    def find_blocks(self, known: Structure) -> FoundBlocks:
        """The model's blocks. Raises BadInput if it has none of the class that the user names."""
        if self.blocks is not None and not outermost(known.model, self.blocks):
            repeated = ", ".join(f"{name} ({count})" for name, count in repeated_classes(known.model).items())
            allowed = f"the class of some of the model's modules: {repeated or 'none is repeated'}"
            raise BadInput("model.blocks", self.blocks, allowed)
        return find_blocks(known.model, known.call, known.example(2), self.blocks)

    def stated(self) -> Stating:
        """What is known of the model without a trial: the class of its blocks, if the user names it."""
        return {Blocks(): self.find_blocks}

    def values(self, model: nn.Module, spec: DataSpec, seed: int) -> Fill:
        """A fill that builds the model once and drops each of its tensors after use, so that little more than one model
        is in memory. It raises BadInput if names are tied here whose values the built model has apart."""
        names = names_of_tensors(model)
        built: dict[str, Tensor] = {}

        def fill(name: str, tensor: Tensor) -> None:
            if not built:
                all_names = {each for tied in names for each in tied}
                built.update(seeded_values(lambda: self.build(spec), seed, all_names))
                for first, *others in names:
                    for other in others:
                        value, other_value = built.get(first), built.pop(other, None)
                        if not (value is None or other_value is None or is_one(value, other_value)):
                            raise self.untied(first, other)
            tensor.copy_(built.pop(name))

        return fill

    def untied(self, first: str, other: str) -> BadInput:
        """The refusal of a model in which two names are tied when it is made, and have different values when it is
        built."""
        allowed = "tied each time that the model's code makes it, or never: they were one tensor at first"
        return BadInput("model", f"{first} and {other} with different values", allowed)


def names_of_tensors(model: nn.Module) -> list[list[str]]:
    """The names of each parameter and buffer of a model, the first one first; of a tied one several."""
    names: dict[Tensor, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(tensor, []).append(name)
    return [*names.values()]


def is_one(value: Tensor, other: Tensor) -> bool:
    return other.data_ptr() == value.data_ptr() or torch.equal(value, other)


def seeded_values(build: Callable[[], nn.Module], seed: int, names: set[str]) -> dict[str, Tensor]:
    """Build a model on the CPU under this seed, from whichever generator it draws; returns its tensors of these
    names."""
    with same_draws_afterwards(), torch.device("cpu"):
        seed_all(seed)
        model = build()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in tensors if name in names}


def without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with values on the CPU, and copy it without memory. Some models can't be built without memory,
    because their code reads values."""
    with without_dispatch_modes(), same_draws_afterwards(), torch.device("cpu"):
        model = build()
    return copied(model, "meta")
