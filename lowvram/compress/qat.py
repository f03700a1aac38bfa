"""qat: whether training rounds the weights of layers as an export with few bits will (quantisation-aware training). It
takes memory in training, and saves none: what it makes smaller is the exported file.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018).
Weights stay in fp32 or bf16, each forward pass multiplies by a rounded copy, and gradients pass the rounding unchanged.
What is rounded, and how, is what an export writes: linear layers as `export.format` of the same name and as `pt2e`,
convolutions as `pt2e`.

The largest weight that shares a scale gets the largest code, 127 or 7, and codes go as far down as up. (By default
torchao divides by 127.5 or 7.5. The largest weight then lies in the middle between two codes, and the last bit of fp32
decides which one it gets.)

`pt2e` first multiplies the weights of a convolution by the scale that the batch norm behind it has for each channel.
That changes no code, so training needn't know of batch norms: a channel has one scale, which takes the same factor, and
a negative factor swaps the signs of codes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compat.torch_modules import become
from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.layers import convolutions, inner_linears, require_replaceable
from lowvram.core.probes.uncalled import Uncalled
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig
from lowvram.core.structure import Structure, known_last_weights, unless

GROUP = 32  # weights of a row that share a scale in 4 bits
LARGEST = 127  # code of a weight in 8 bits; the smallest is -127
LARGEST_OF_4 = 7  # as `LARGEST`, of a weight in 4 bits
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal  # of rounded weights


def has_inner_linears(known: Structure) -> bool:
    return bool(inner_linears(known.model, known.last_weights))


INNER_LINEARS = ModelFact(
    "the model has linear layers besides the last",
    unless(has_inner_linears, "this model has none: leave qat=none (qat=int8 takes convolutions too)"),
)
INNER_PRODUCTS = ModelFact(
    "the model has linear layers besides the last, or convolutions of images",
    unless(lambda known: has_inner_linears(known) or convolutions(known.model), "this model has none: leave qat=none"),
)


class Layers(Enum):
    """The layers that round their weights. The names are what a user types."""

    auto = "linear layers but the last; convolutions, if there are no such linear layers"
    linear = "linear layers but the last"
    all = "linear layers but the last, and convolutions"


@final
@dataclass(frozen=True)
class NoQat(Knob):
    """Layers multiply by their weights as they are."""

    group_name = "qat"
    stage = Stage.BUILD
    searched = False  # it saves nothing while training

    def apply(self, rig: Rig) -> Rig:
        return rig


class FakeQuantized(Knob):
    """Layers of the model round their weights in each forward pass."""

    name: ClassVar[str]  # as it is typed

    group_name = "qat"
    stage = Stage.BUILD
    exactness = Exactness.LOSSY

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.PLAIN_PRODUCTS, Fact.OWN_LINEARS})


@final
@dataclass(frozen=True)
class Int8(FakeQuantized):
    """Weights of 8 bits, with one scale for each row of a linear layer or output channel of a convolution."""

    name = "qat=int8"

    layers: Layers = Layers.auto

    band = 2e-1

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({STEADY_WEIGHTS, INNER_LINEARS if self.layers is Layers.linear else INNER_PRODUCTS})

    def apply(self, rig: Rig) -> Rig:
        inner = inner_linears(rig.model, known_last_weights(rig.structure, self.name))
        linears = [layer for layer in inner if layer.in_features > 1]  # a row of one number needs no scale
        has_convolutions = self.layers is Layers.all or (self.layers is Layers.auto and not linears)
        found = convolutions(rig.model) if has_convolutions else []
        require(bool(linears or found), "qat", "int8", "another option: no inner layer has more than one input")
        require_replaceable(rig.model, [*linears, *found], rig.structure.get(Uncalled()), self.name, "choose qat=none")
        for linear in linears:
            become(linear, FakeQuantizedLinear(linear, LARGEST))
        for convolution in found:
            become(convolution, FakeQuantizedConv2d(convolution))
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

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({STEADY_WEIGHTS, INNER_LINEARS})

    def weights_per_scale(self) -> int:
        return self.group

    def apply(self, rig: Rig) -> Rig:
        linears = inner_linears(rig.model, known_last_weights(rig.structure, self.name))
        divided = [layer for layer in linears if divides(self.group, layer)]
        allowed = "another option: the rows of no linear layer but the last can be divided into groups (qat.group)"
        require(bool(divided), "qat", "int4", allowed)
        require_replaceable(rig.model, divided, rig.structure.get(Uncalled()), self.name, "choose qat=none")
        for layer in divided:
            become(layer, FakeQuantizedLinear(layer, LARGEST_OF_4, self.group))
        return rig


@final
class FakeQuantizedLinear(nn.Linear):
    """A linear layer that rounds its weight in each forward pass."""

    def __init__(self, layer: nn.Linear, largest: int, group: int | None = None) -> None:
        """
        Args:
            layer: whose parameters become this one's.
            largest, group: as `scales_of` takes them.
        """
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.largest, self.group = largest, group

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, rounded(self.weight, self.largest, self.group), self.bias)


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


def rounded(weight: Tensor, largest: int = LARGEST, group: int | None = None) -> Tensor:
    """A weight with each value rounded to a code times its scale. Gradients pass the rounding unchanged.

    Args:
        weight, largest, group: as `scales_of` takes them.
    """
    scale = scales_of(weight, largest, group)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    rows = weight if group is None else weight.reshape(-1, group)
    return torch.fake_quantize_per_channel_affine(rows, scale, zero, 0, -largest, largest).view_as(weight)


def codes_of(weight: Tensor, scale: Tensor, largest: int) -> Tensor:
    """The codes by which `rounded` replaces a weight, int8, in the weight's shape.

    Args:
        scale: of each piece of the weight, as `scales_of` returns them.
    """
    pieces = weight.detach().reshape(len(scale), -1).float()
    codes = (pieces * (1 / scale)[:, None]).round().clamp(-largest, largest)
    return codes.to(torch.int8).reshape(weight.shape)


def scales_of(weight: Tensor, largest: int, group: int | None = None) -> Tensor:
    """The scales of a weight of at least two dimensions, fp32: each maps the largest value of its piece to the largest
    code.

    Args:
        largest: code; the smallest is -largest.
        group: how many values of a row share a scale, of a weight of two dimensions; None: all values with the same
            first index.
    """
    pieces = weight.detach() if group is None else weight.detach().reshape(-1, group)
    found = torch.linalg.vector_norm(pieces, torch.inf, tuple(range(1, pieces.dim())))
    return (found.float() / largest).clamp(min=SMALLEST_SCALE)


def divides(group: int, layer: nn.Linear) -> bool:
    """Whether the layer's rows can be divided into groups of so many weights."""
    return layer.in_features % group == 0
