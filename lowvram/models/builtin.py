"""The bases of lowvram's own models and of their configurations. A new model extends both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput, require
from lowvram.config.transforms import GrowthKind
from lowvram.core.mesh import tell
from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.probes.runs import TOLD, Told
from lowvram.core.probes.splits import SPLITS, Splits
from lowvram.core.probes.stated import BRANCHES, TAIL, Tail
from lowvram.core.seeds import generator_for
from lowvram.core.structure import Blocks, Stating
from lowvram.core.values import Fill
from lowvram.data.spec import DataSpec
from lowvram.models import layout
from lowvram.models.config import ModelConfig
from lowvram.models.growth import Grown, copied_tensors, sources
from lowvram.models.remade import Remade, Trained
from lowvram.models.widths import InnerWidth, Pruned
from lowvram.models.wrappers import plain_names, taken_off

BLOCKS = "blocks"  # the list of blocks in each of lowvram's models
LAST = ("head.weight",)


class OwnModule(nn.Module, ABC):
    """A model that names its repeated blocks and its head, and fills each of its tensors."""

    blocks: nn.ModuleList  # the repeated units, in the order in which the forward pass first meets them
    head: nn.Linear  # makes the logits

    def found_blocks(self) -> FoundBlocks:
        return FoundBlocks(tuple(f"{BLOCKS}.{number}" for number in range(len(self.blocks))), "head", True, LAST)

    def branches(self) -> tuple[tuple[str, ...], ...]:
        """Of each block the modules whose outputs it adds to what it was given; empty if they aren't known."""
        return ()

    def splits(self) -> Splits | None:
        """How its layers can be split over ranks; None if they can't."""
        return None

    def told(self) -> Told | None:
        """Which argument tells it at which positions its tokens are; None if there is none."""
        return None

    def tail(self) -> Tail | None:
        """What the model computes after its last block; None if it isn't known."""
        return None

    @abstractmethod
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one tensor in place with its initial value.

        Args:
            name: the dotted name in `named_parameters()` or `named_buffers()`.
            generator: on the device of `tensor`.

        Raises:
            KeyError: no tensor of this model has this name.
        """


@dataclass(frozen=True)
class OwnModel(ModelConfig, Remade):
    """The configuration of an `OwnModule`.

    The model is made without values. Each tensor is filled later: from `init`, the folder of an exported model, or if
    that is None, from a random generator of its own.
    """

    init: str | None = field(default=None, kw_only=True)

    def check_paths(self) -> None:
        """Raises BadInput if `init` isn't the folder of an exported model."""
        if self.init is not None:
            layout.weights_in(self.init)

    def trained_folder(self) -> Path | None:
        return None if self.init is None else Path(self.init).expanduser()

    def weight_files(self) -> list[Path]:
        return [] if self.init is None else [layout.weights_in(self.init)]

    def written_in(self, folder: Path) -> Self:
        return replace(self, init=str(folder))

    def changes(self, new: Any) -> str:
        before, after = layout.plain(self), layout.plain(new)
        changed = (name for name, value in after.items() if name != "init" and value != before[name])
        return " ".join(f"model.{name}={after[name]}" for name in changed)

    def smaller(self, trained: Trained, ratio: float, multiple: int) -> Pruned:
        small = self.pruned(ratio, multiple)
        return Pruned(small, self.inner_widths(), [width.num_units for width in small.inner_widths()], [])

    def pruned(self, ratio: float, multiple: int) -> Self:
        """The configuration of the same model with smaller widths inside its blocks, and without `init`.

        Args:
            ratio: the share of each of these widths that leaves.
            multiple: of which those widths stay multiples that aren't counted in heads.

        Raises:
            BadInput: the model can't be pruned.
        """
        raise BadInput("model", type(self).__name__, "one that names its `inner_widths`, to be pruned")

    def inner_widths(self) -> list[InnerWidth]:
        """The widths inside the blocks, each with its places in the model's tensors."""
        return []

    def deeper(self, trained: Trained, factor: int, how: GrowthKind) -> Grown:
        config, runs, model = self.grown(factor, how), self.runs_of_blocks(), own(trained.model)
        allowed = "the folder of a model with a block that keeps the image's shape, to be copied: it has none"
        require(any(runs), "grow.run", self.init, allowed)
        num_blocks = len(model.blocks)
        lists = {BLOCKS: sources(runs, num_blocks, factor, how)}
        last_layers = {f"{BLOCKS}.{number}": self.last_layers for number in range(num_blocks)}
        return Grown(config, copied_tensors(model.state_dict(), lists, last_layers), [])

    def grown(self, factor: int, how: GrowthKind) -> Self:
        """The configuration of the same model with each block of `runs_of_blocks` `factor` times, and without `init`.

        Raises:
            BadInput: the model can't be grown, or not so.
        """
        raise BadInput("model", type(self).__name__, "one that names its `runs_of_blocks`, to be grown")

    def runs_of_blocks(self) -> list[range]:
        """Consecutive blocks, by their numbers, that may stand in any order and any number of times."""
        return []

    @property
    def last_layers(self) -> tuple[str, ...]:
        """Of a block the names of the layers that, if they are zero, make it hand on what it is given."""
        return ()

    @abstractmethod
    def make(self, spec: DataSpec) -> OwnModule: ...

    @property
    def description(self) -> str:
        return repr(self)

    def check_packed(self) -> None:
        raise BadInput("loader", "packed", "bucketed: this model doesn't keep the sequences of one row apart")

    def call(self, model: nn.Module, inputs: Any) -> Tensor:
        return model(inputs)

    def stated(self) -> Stating:
        return {
            Blocks(): lambda known: own(known.model).found_blocks(),
            BRANCHES: lambda known: own(known.model).branches(),
            SPLITS: lambda known: own(known.model).splits(),
            TOLD: lambda known: own(known.model).told(),
            TAIL: lambda known: own(known.model).tail(),
        }

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None:
        layout.save(model, self, spec, folder)

    def values(self, model: Any, spec: DataSpec, seed: int) -> Fill:
        if self.init is None:
            return InitialValues(model, seed)
        if renamed := plain_names(layout.names_at(self.init, self.weight_files()), model.state_dict()):
            tell(f"model.init={self.init}: {taken_off(renamed)}")
        return SavedValues(self.init)


def own(model: nn.Module) -> OwnModule:
    assert isinstance(model, OwnModule)
    return model


@final
@dataclass(frozen=True)
class InitialValues:
    """Fills the tensors of one of our own models, one after another."""

    model: Any
    seed: int

    def __call__(self, name: str, tensor: Tensor) -> None:
        self.model.initialise(name, tensor, generator_for(self.seed, name, tensor.device))

    without_values = __call__  # a plan counts what this allocates


@final
@dataclass(frozen=True)
class SavedValues:
    """Fills the tensors with those of an exported model, one after another."""

    folder: str  # `model.init`

    def __call__(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(layout.read_tensor(self.folder, name, tensor.shape))
