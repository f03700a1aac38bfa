"""Which weights get masks, and what all options have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from torch import nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compress.sparsity.masks import Mask, Masking, Rule
from lowvram.config.errors import BadInput, require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.layers import is_transposed, owns_weight
from lowvram.core.names import check_matches, is_named
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS, Structure

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
UNKNOWN_STEPS = 100  # the length of a run that is only planned


@final
@dataclass(frozen=True)
class NoSparsity(Knob):
    """No weight is kept at zero."""

    group_name = "sparsity"
    stage = Stage.OPTIMIZER
    searched = False

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class Masked(Knob):
    """The base of options with masks. They change what is learnt, and save no memory."""

    layers: list[str] | None = None
    steps: int | None = None

    group_name = "sparsity"
    stage = Stage.OPTIMIZER
    exactness = Exactness.LOSSY
    band = 1e-5  # of gradients of the same masked weights
    breaks_always = frozenset({Fact.UNDOABLE_STEPS})  # a mask counts steps without an update, too

    def __post_init__(self) -> None:
        allowed = "null (the layers of the blocks) or a list of at least one name"
        require(self.layers is None or bool(self.layers), "sparsity.layers", "[]", allowed)
        allowed = "null (train.steps) or at least 1"
        require(self.steps is None or self.steps >= 1, "sparsity.steps", self.steps, allowed)

    def needs(self) -> frozenset[Fact | ModelFact]:
        blocks = {BLOCKS} if self.layers is None else set()
        # Zeroth-order steps move masked weights away from 0, and count on it that an update moves them back.
        trained = {Fact.TRAINED_BLOCKS, Fact.SAME_PARAMS, Fact.PLAIN_BACKWARD}
        return frozenset({Fact.WHOLE_UPDATES, STEADY_WEIGHTS, SEPARATE_MEMORY, REAL_WEIGHTS, *trained, *blocks})

    def reference(self) -> Self:
        """Itself: it decides which weights are learnt."""
        return self

    def caveat(self, model: nn.Module) -> str:
        return f"masked weights are 0: {self.what_is_masked()}"

    def for_steps(self, num_steps: int) -> Self:
        return self if self.steps is not None else replace(self, steps=num_steps)

    @property
    def num_steps(self) -> int:
        return self.steps or UNKNOWN_STEPS

    def layers_with_masks(self, known: Structure) -> Mapping[str, Any]:
        """The layers whose weights have masks, by name."""
        layers = layers_of(known.model)
        if self.layers is None:
            found = in_blocks(known, layers)
        else:
            check_matches("sparsity.layers", self.layers, layers, "linear layers and convolutions")
            found = {name: layer for name, layer in layers.items() if is_named(name, self.layers)}
        found = {name: layer for name, layer in found.items() if self.can_mask(layer)}
        if not found:
            raise BadInput("sparsity.layers", self.layers, f"names of layers {self.what_can_be_masked()}: here is none")
        return found

    def apply(self, rig: Rig) -> Rig:
        masks = [Mask(name, layer) for name, layer in self.layers_with_masks(rig.structure).items()]
        allowed = "the number of updates, where no train.steps gives it: set sparsity.steps, or call `for_steps`"
        require(self.steps is not None or is_fake(masks[0].masked), "sparsity.steps", self.steps, allowed)
        masking = Masking(masks, self.rule(masks), self.final_share)
        return replace(rig, make_optimizer=masking.around(rig.make_optimizer)).then_over_time(masking.start)

    def can_mask(self, layer: Any) -> bool:
        return layer.weight.requires_grad

    def what_can_be_masked(self) -> str:
        return "whose weights train"

    @property
    @abstractmethod
    def final_share(self) -> float:
        """The share of the weights with masks that are masked at the end."""

    @abstractmethod
    def what_is_masked(self) -> str:
        """Half a sentence on how many weights are masked, and when."""

    @abstractmethod
    def rule(self, masks: Sequence[Mask]) -> Rule:
        """How the masks change."""


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The linear layers and convolutions whose weight isn't computed from other parameters, by name; of those that
    share a weight the first."""
    named: Iterable[tuple[str, Any]] = model.named_modules()
    kinds = [(name, layer) for name, layer in named if isinstance(layer, LAYERS) or is_transposed(layer)]
    layers = [(name, layer) for name, layer in kinds if owns_weight(layer)]
    first = {layer.weight: (name, layer) for name, layer in reversed(layers)}
    return {name: layer for name, layer in layers if first[layer.weight] == (name, layer)}


def in_blocks(known: Structure, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the layers that are in the model's blocks and share no weight with an embedding or the head: so neither
    the first layer nor the last."""
    inside = {module for block in known.blocks for module in block.modules()}
    elsewhere = {module.weight for module in known.model.modules() if isinstance(module, nn.Embedding)}
    if (head := known.head) is not None:
        elsewhere.add(head.weight)
    return {name: layer for name, layer in layers.items() if layer in inside and layer.weight not in elsewhere}


def check_share(share: float) -> None:
    require(0 < share < 1, "sparsity.share", share, "above 0 and below 1: the share of masked weights that are 0")


def check_every(every: int) -> None:
    require(every >= 1, "sparsity.every", every, "at least 1 step")


def check_time(name: str, share: float) -> None:
    require(0 <= share <= 1, f"sparsity.{name}", share, "between 0 (the first step) and 1 (the last)")


def step_at(share: float, num_steps: int) -> int:
    """The number of the step, from 0, that comes after this share of a run."""
    return min(num_steps - 1, round(share * num_steps))
