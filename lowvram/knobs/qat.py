"""qat: whether training rounds the weights of linear layers as an export with few bits will (quantisation-aware
training). It takes memory in training, and saves none: what it makes smaller is the exported file.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018). The
layers are torchao's: weights stay in fp32 or bf16, each forward pass multiplies by a rounded copy, and gradients pass
the rounding unchanged. What is rounded, and how, is what `export.format` of the same name writes, so a model computes
the same before and after its export.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, final

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.core.knob import Exactness, Fact, Knob, Stage
from lowvram.core.layers import inner_linears
from lowvram.core.quiet import quiet
from lowvram.core.rig import Rig

GROUP = 32  # weights of a row that share a scale in 4 bits


@final
@dataclass(frozen=True)
class NoQat(Knob):
    """Layers multiply by their weights as they are."""

    group: ClassVar[int] = GROUP

    stage = Stage.BUILD
    searched = False  # it saves nothing while training

    def apply(self, rig: Rig) -> Rig:
        return rig


class FakeQuantized(Knob):
    """The linear layers of the model, but not its last, round their weights in each forward pass."""

    stage = Stage.BUILD
    exactness = Exactness.LOSSY
    libraries = ("torchao.quantization", "torchao.quantization.qat")

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.INNER_LINEARS})

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.PLAIN_PRODUCTS})

    @abstractmethod
    def weights(self) -> Any:
        """torchao's configuration of the weights."""

    @abstractmethod
    def fits(self, layer: nn.Linear) -> bool:
        """Whether the layer can be rounded in this way."""

    def apply(self, rig: Rig) -> Rig:
        layers = [layer for layer in inner_linears(rig.model, rig.task.head(rig.model)) if self.fits(layer)]
        check_any(layers, "qat")
        with quiet():
            qat = import_module("torchao.quantization.qat")
            quantize(rig.model, qat.QATConfig(self.weights(), step="prepare"), layers)
        return rig


@final
@dataclass(frozen=True)
class Int8(FakeQuantized):
    """Weights of 8 bits, with one scale for each row."""

    group: ClassVar[int] = GROUP  # of an export in 4 bits

    band = 2e-1

    def weights(self) -> Any:
        return int8_weights()

    def fits(self, layer: nn.Linear) -> bool:
        del layer
        return True


@final
@dataclass(frozen=True)
class Int4(FakeQuantized):
    """Weights of 4 bits, with one scale for each `group` weights of a row. Layers whose rows can't be divided so stay
    as they are."""

    group: int = GROUP  # pyright: ignore[reportIncompatibleVariableOverride]

    band = 7e-1  # weights are off by a tenth

    def __post_init__(self) -> None:
        require(self.group >= 2 and self.group % 2 == 0, "qat.group", self.group, "an even number of 2 or more")

    def weights(self) -> Any:
        return int4_weights(self.group)

    def fits(self, layer: nn.Linear) -> bool:
        return divides(self.group, layer)


def divides(group: int, layer: nn.Linear) -> bool:
    """Whether the layer's rows can be divided into groups of so many weights."""
    return layer.in_features % group == 0


def check_any(layers: list[nn.Linear], key: str) -> None:
    """Raises BadInput if no layer is left to be rounded."""
    allowed = "another option: the rows of no linear layer but the last can be divided into groups (qat.group)"
    require(bool(layers), key, "int4", allowed)


def int8_weights() -> Any:
    """torchao's configuration of weights of 8 bits, with one scale for each row."""
    torchao: Any = import_module("torchao.quantization")
    return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0))


def int4_weights(group: int) -> Any:
    """torchao's configuration of weights of 4 bits, with one scale for each `group` weights of a row."""
    torchao: Any = import_module("torchao.quantization")
    int4: torch.dtype = torch.int4  # pyright: ignore[reportAttributeAccessIssue]
    return torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(group))


def quantize(model: nn.Module, config: Any, layers: list[nn.Linear]) -> None:
    """torchao's `quantize_` on these layers, in place."""
    chosen = set(layers)
    is_chosen: Callable[[nn.Module, str], bool] = lambda module, name: module in chosen  # noqa: E731
    import_module("torchao.quantization").quantize_(model, config, filter_fn=is_chosen)
