"""Low-rank adapters: the model is frozen, and two small matrices beside each layer train, whose product is added to the
layer's weight.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); Dettmers et al., "QLoRA: Efficient Finetuning of
Quantized LLMs" (2023); Zhang et al., "LoRA-FA: Memory-efficient Low-rank Adaptation for Large Language Models
Fine-tuning" (2023): only the second matrix trains; Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning
with LoRA" (2023). The layers are peft's, put into the model in place: `x.weight`
becomes `x.base_layer.weight`, and `x.lora_A.default.weight` and `x.lora_B.default.weight` are new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import nn

from lowvram.compat.torch_modules import become
from lowvram.config.errors import require
from lowvram.core.extra_state import extra_states, give
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.layers import require_replaceable
from lowvram.core.misfits import ONCE, TAKES_PART
from lowvram.core.names import check_matches, is_named
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.uncalled import Uncalled
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig
from lowvram.core.states import with_values
from lowvram.core.structure import BLOCKS, Structure
from lowvram.knobs.adapter.adapted import Adapted
from lowvram.knobs.adapter.layers import NAME, adapted, config_of, layers_of, linear_or_else_all, product_of, put_in
from lowvram.knobs.adapter.nf4 import FourBit
from lowvram.knobs.adapter.parts import Frozen, freeze_statistics, leaves
from lowvram.knobs.adapter.save_adapter import plain_values, read, write


@dataclass(frozen=True)
class Lora(Frozen):
    """Two matrices of rank `rank` train beside each layer: A, which reads the layer's inputs, and B. Without `train_a`
    only B trains, so the inputs aren't kept for the backward pass. The layers that `train` names train fully. Their
    product is multiplied by alpha / rank, with `rank_stabilized` by alpha / sqrt(rank)."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] | None = None
    train: list[str] = field(default_factory=list)
    train_a: bool = True
    rank_stabilized: bool = False

    band = 1e-5
    misfits = TAKES_PART
    libraries = ("peft",)

    def __post_init__(self) -> None:
        require(self.rank >= 1, "adapter.rank", self.rank, "at least 1")
        require(0 < self.alpha < math.inf, "adapter.alpha", self.alpha, "more than 0")
        require(0 <= self.dropout < 1, "adapter.dropout", self.dropout, "at least 0 and less than 1")
        allowed = "null (the blocks' layers) or a list of at least one name"
        require(self.targets is None or bool(self.targets), "adapter.targets", "[]", allowed)
        needed = "none or freeze, or peft installed: pip install 'lowvram[hf]'"
        require(find_spec("peft") is not None, "adapter", type(self).__name__.lower(), needed)

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({Fact.PLAIN_PRODUCTS, STEADY_WEIGHTS, *({BLOCKS} if self.targets is None else ())})

    def breaks(self) -> frozenset[Fact | ModelFact]:
        return frozenset({Fact.TRAINED_BLOCKS, *([NO_RANDOMNESS] if self.dropout else [])})

    def reference(self) -> Lora:
        return Lora(**{each.name: getattr(self, each.name) for each in fields(Lora)})

    def apply(self, rig: Rig) -> Rig:
        layers, option = self.targeted(rig.structure).values(), f"adapter={type(self).__name__.lower()}"
        mend = "name other layers in adapter.targets, or choose adapter=freeze"
        require_replaceable(rig.model, list(layers), rig.structure.get(Uncalled()), option, mend)
        self.adapt(rig.structure)
        return replace(rig, task=Adapted(rig.task, self.adapt))

    def adapt(self, known: Structure) -> None:
        """Put the adapters into a model."""
        model = known.model
        check_matches("adapter.train", self.train, leaves(model), "the model's layers")
        full = {name: layer for name, layer in leaves(model).items() if is_named(name, self.train)}
        targets = {name: layer for name, layer in self.targeted(known).items() if name not in full}
        require(bool(targets), "adapter.train", self.train, "fewer: no layer is left for an adapter")
        in_blocks = layers_in_blocks(known)
        inner = put_in(model, targets, self.options())
        for layer in adapted(model).values():
            layer.lora_A[NAME].requires_grad_(self.train_a)
        for layer in full.values():
            layer.requires_grad_()
        frozen = [layer for layer in in_blocks.values() if layer not in set(full.values())]
        self.quantize([inner.get(layer, layer) for layer in frozen])
        freeze_statistics(model)

    def quantize(self, layers: Collection[nn.Module]) -> None:
        """Quantize the frozen weights of these layers; plain LoRA doesn't."""

    def options(self) -> dict[str, Any]:
        """The options of peft's LoraConfig."""
        scale = {"r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rank_stabilized}
        return {**scale, "lora_dropout": self.dropout}

    def targeted(self, known: Structure) -> dict[str, nn.Module]:
        """The layers that get an adapter, by name."""
        if self.targets is None:
            layers = linear_or_else_all(layers_in_blocks(known))
            allowed = "none or freeze: the model's blocks have no layer that can carry an adapter"
            require(bool(layers), "adapter", type(self).__name__.lower(), allowed)
            return layers
        layers = layers_of(known.model, known.head)
        check_matches("adapter.targets", self.targets, layers, "linear layers and convolutions but the head")
        return {name: layer for name, layer in layers.items() if is_named(name, self.targets)}

    def save_adapter(self, model: nn.Module, folder: Path, base: str | None) -> bool:
        layers = {name: layer.base_layer for name, layer in adapted(model).items()}
        full = full_layers(model)
        saved = {"modules_to_save": list(full) or None, "base_model_name_or_path": base, "inference_mode": True}
        write(model, folder, config_of(layers, self.options() | saved), full)
        return True

    def load_adapter(self, model: nn.Module, folder: Path) -> None:
        read(model, folder, full_layers(model))

    def merged(self, model: nn.Module, make_plain: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            plain = make_plain()
        return give(with_values(plain, plain_values(model)), extra_states(model))


def full_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that train without an adapter, and those that share a trained weight with such a layer, by name."""
    matrices = {matrix for layer in adapted(model).values() for matrix in (layer.lora_A[NAME], layer.lora_B[NAME])}

    def trains(layer: nn.Module) -> bool:
        return layer not in matrices and any(weight.requires_grad for weight in layer.parameters(False))

    return {name: layer for name, layer in leaves(model).items() if trains(layer)}


def layers_in_blocks(known: Structure) -> dict[str, nn.Module]:
    """The layers of the blocks that can carry an adapter."""
    inside = {module for block in known.blocks for module in block.modules()}
    return {name: layer for name, layer in layers_of(known.model, known.head).items() if layer in inside}


@final
@dataclass(frozen=True)
class QLora(Lora):
    """LoRA, with the frozen weights of the blocks' layers kept in 4 bits."""

    # Weights are off by a tenth, and in most models gradients are too; norms over few values and ReLUs amplify that.
    band = 7e-1
    misfits: ClassVar[Mapping[str, str]] = {**TAKES_PART, **ONCE}
    saves = Kind.PARAMETERS

    def quantize(self, layers: Collection[nn.Module]) -> None:
        for layer in layers:
            product = product_of(layer)
            assert product is not None
            become(layer, FourBit(layer, product))
