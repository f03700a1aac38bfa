"""qat: whether training rounds the weights of layers as an export with few bits will (quantisation-aware training). It
takes memory in training, and saves none: what it makes smaller is the exported file.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018).
Weights stay in fp32 or bf16, each forward pass multiplies by a rounded copy, and gradients pass the rounding unchanged.
What is rounded, and how, is what an export writes. Linear layers are torchao's, and round as `export.format` of the
same name, and as the linear layers of `export.format=pt2e`. Convolutions round as those of `pt2e`.

`pt2e` first multiplies the weights of a convolution by the scale that the batch norm behind it has for each channel.
That changes no code, so training needn't know of batch norms: a channel has one scale, which takes the same factor, and
codes go as far down as up, so that a negative factor swaps their signs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.knob import Exactness, Fact, Knob, Stage
from lowvram.core.last_layer import known_last_weights
from lowvram.core.layers import convolutions, inner_linears
from lowvram.core.quiet import quiet
from lowvram.core.rig import Rig

GROUP = 32  # weights of a row that share a scale in 4 bits
LARGEST = 127  # code of a convolution's weight in 8 bits; the smallest is -127
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal  # of rounded weights, as in torchao


class Layers(Enum):
    """The layers that round their weights. The names are what a user types."""

    auto = "linear layers but the last; convolutions, if there are no such linear layers"
    linear = "linear layers but the last"
    all = "linear layers but the last, and convolutions"


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
    """Layers of the model round their weights in each forward pass."""

    name: ClassVar[str]  # as it is typed

    stage = Stage.BUILD
    exactness = Exactness.LOSSY
    libraries = ("torchao.quantization", "torchao.quantization.qat")

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.PLAIN_PRODUCTS})


@final
@dataclass(frozen=True)
class Int8(FakeQuantized):
    """Weights of 8 bits, with one scale for each row of a linear layer or output channel of a convolution."""

    name = "qat=int8"
    group: ClassVar[int] = GROUP  # of an export in 4 bits

    layers: Layers = Layers.auto

    band = 2e-1

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.INNER_LINEARS if self.layers is Layers.linear else Fact.INNER_PRODUCTS})

    def apply(self, rig: Rig) -> Rig:
        inner = inner_linears(rig.model, known_last_weights(rig.task, rig.model, self.name))
        linears = [layer for layer in inner if layer.in_features > 1]  # a row of one number needs no scale
        has_convolutions = self.layers is Layers.all or (self.layers is Layers.auto and not linears)
        round_linears(rig.model, int8_weights(), linears)
        found = convolutions(rig.model) if has_convolutions else []
        require(bool(linears or found), "qat", "int8", "another option: no inner layer has more than one input")
        round_convolutions(rig.model, found)
        return rig


@final
@dataclass(frozen=True)
class Int4(FakeQuantized):
    """Weights of linear layers, but the last, of 4 bits, with one scale for each `group` weights of a row. Layers whose
    rows can't be divided so stay as they are."""

    group: int = GROUP

    name = "qat=int4"
    band = 7e-1  # weights are off by a tenth

    def __post_init__(self) -> None:
        require(self.group >= 2 and self.group % 2 == 0, "qat.group", self.group, "an even number of 2 or more")

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.INNER_LINEARS})

    def apply(self, rig: Rig) -> Rig:
        linears = inner_linears(rig.model, known_last_weights(rig.task, rig.model, self.name))
        divided = [layer for layer in linears if divides(self.group, layer)]
        allowed = "another option: the rows of no linear layer but the last can be divided into groups (qat.group)"
        require(bool(divided), "qat", "int4", allowed)
        round_linears(rig.model, int4_weights(self.group), divided)
        return rig


@final
class FakeQuantizedConv2d(nn.Conv2d):
    """A convolution, with zeros around the image, that rounds its weight in each forward pass."""

    def __init__(self, layer: nn.Conv2d) -> None:
        """
        Args:
            layer: whose parameters become this one's.
        """
        like: Any = (layer.in_channels, layer.out_channels, layer.kernel_size, *options_of(layer))
        super().__init__(*like, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, rounded(self.weight), self.bias, *options_of(self))


def options_of(layer: nn.Conv2d) -> tuple[Any, ...]:
    """What a convolution does beside its weight and bias, as F.conv2d takes it."""
    return layer.stride, layer.padding, layer.dilation, layer.groups


def rounded(weight_oihw: Tensor) -> Tensor:
    """The weight of a convolution with each value rounded to 8 bits, with one scale for each output channel o, which
    maps the channel's largest value to the largest code. Gradients pass the rounding unchanged."""
    largest_o = torch.linalg.vector_norm(weight_oihw.detach(), torch.inf, (1, 2, 3))
    scale_o = (largest_o.float() / LARGEST).clamp(min=SMALLEST_SCALE)
    zero_o = torch.zeros_like(scale_o, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight_oihw, scale_o, zero_o, 0, -LARGEST, LARGEST)


def divides(group: int, layer: nn.Linear) -> bool:
    """Whether the layer's rows can be divided into groups of so many weights."""
    return layer.in_features % group == 0


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


def round_linears(model: nn.Module, weights: Any, layers: list[nn.Linear]) -> None:
    """Exchange these layers of the model, in place, by torchao's that round their weights.

    Args:
        weights: torchao's configuration of them.
    """
    with quiet():
        qat = import_module("torchao.quantization.qat")
        quantize(model, qat.QATConfig(weights, step="prepare"), layers)


def round_convolutions(model: nn.Module, layers: list[nn.Conv2d]) -> None:
    """Exchange these layers of the model, in place, by such as round their weights."""
    exchanged = {layer: FakeQuantizedConv2d(layer) for layer in layers}
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if isinstance(module, nn.Conv2d) and module in exchanged:
            model.set_submodule(name, exchanged[module])
