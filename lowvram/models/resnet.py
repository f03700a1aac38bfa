"""Residual networks for images.

Shapes: n samples, c channels, h height and w width of an image, k classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.config.transforms import GrowthKind
from lowvram.core.probes.stated import Tail
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.builtin import OwnModel, OwnModule
from lowvram.models.widths import InnerWidth, num_kept, one_each, usual_width

GROUPS = 32  # of a group norm, or fewer where they would not divide the channels (Wu & He, 2018)
EPSILON = 1e-5  # added to variances
OF_NORMS = ("weight", "bias", "running_mean", "running_var")  # of a norm that isn't a group norm, one each per channel
HEAD_STD = 0.01  # of the last layer's initial weights (Goyal et al., 2017)


class BlockKind(Enum):
    """What a block computes beside its shortcut. The names are what a user types."""

    basic = "two 3x3 convolutions (ResNet-18, -34)"
    bottleneck = "1x1, 3x3 and 1x1 to four times the width (ResNet-50 and deeper)"


class StemKind(Enum):
    """What comes before the blocks, named by the share of the image's side that is left."""

    full = "3x3 convolution"
    half = "3x3 convolution of stride 2"
    quarter = "7x7 convolution of stride 2, then max pooling of stride 2 (ImageNet's)"


class NormKind(Enum):
    """How activations are normalised."""

    batch = "by the statistics of the batch; running ones in evaluation"
    group = "by the statistics of groups of channels of each sample"
    frozen = "by statistics and an affine map that never change"


class Initialisation(Enum):
    """How convolutions start."""

    kaiming = "normal, keeping the variance of gradients through ReLU (He et al., 2015)"
    xavier = "uniform, keeping variances through linear layers (Glorot & Bengio, 2010)"


@final
@dataclass(frozen=True)
class ResNetConfig(OwnModel):
    """A residual network: sizes, and what a user may choose about it.

    Raises:
        BadInput: a value out of range; it names `model.<field>`.
    """

    block: BlockKind = BlockKind.basic
    layers: list[int] = field(default_factory=lambda: [3, 3, 3, 3])
    width: int = 16
    stem: StemKind = StemKind.half
    image_size: int = 64
    num_classes: int | None = None
    norm: NormKind = NormKind.batch
    in_place: bool = True
    channels_last: bool = False
    zero_init_last_gamma: bool = False
    initialisation: Initialisation = Initialisation.kaiming
    dropout: float = 0.0
    inner_width: int | None = None

    def __post_init__(self) -> None:
        positive = min(self.layers, default=0) > 0
        require(positive, "model.layers", self.layers, "a list of positive numbers, one per stage")
        require(self.width > 0, "model.width", self.width, "a positive number")
        inner = self.inner_width
        require(inner is None or inner > 0, "model.inner_width", inner, "a positive number, or null")
        require(self.image_size > 0, "model.image_size", self.image_size, "a positive number")
        classes = self.num_classes
        require(classes is None or classes > 0, "model.num_classes", classes, "a positive number, or null")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and less than 1")
        dead = self.zero_init_last_gamma and self.norm is NormKind.frozen
        why = "false with model.norm=frozen: a gamma of zero that never learns switches its block off"
        require(not dead, "model.zero_init_last_gamma", self.zero_init_last_gamma, why)

    @property
    def modality(self) -> Modality:
        return Modality.IMAGES

    @property
    def inner_channels(self) -> int:
        """Channels inside the blocks of the first stage."""
        return self.inner_width or self.width

    def pruned(self, ratio: float, multiple: int) -> ResNetConfig:
        """Channels inside the blocks leave, between their convolutions.

        Raises:
            BadInput: group norms follow these convolutions.
        """
        allowed = "batch or frozen where channels are pruned: in a group of a norm, those that stay would change"
        require(self.norm is not NormKind.group, "model.norm", self.norm.name, allowed)
        return replace(self, inner_width=num_kept(self.inner_channels, ratio, multiple), init=None)

    def inner_widths(self) -> list[InnerWidth]:
        """Of each block the channels between its convolutions, in their order."""
        stages = [stage for stage, num_blocks in enumerate(self.layers) for _ in range(num_blocks)]
        return [
            usual_width(
                (
                    f"blocks.{index}.{writer}.conv.weight",
                    *(f"blocks.{index}.{writer}.norm.{name}" for name in OF_NORMS),
                ),
                f"blocks.{index}.{reader}.conv",
                *2 * [one_each(self.inner_channels * 2**stage)],
            )
            for index, stage in enumerate(stages)
            for writer, reader in pairwise(BLOCKS[self.block].convolutions)
        ]

    def grown(self, factor: int, how: GrowthKind) -> ResNetConfig:
        """Raises BadInput if norms that never change would keep a block switched off."""
        is_dead = how is GrowthKind.identity and self.norm is NormKind.frozen
        allowed = "stack or interleave with model.norm=frozen: a gamma of zero that never learns switches its block off"
        require(not is_dead, "grow.how", how.name, allowed)
        added = [(factor - 1) * len(run) for run in self.runs_of_blocks()]
        return replace(self, layers=[old + new for old, new in zip(self.layers, added, strict=True)], init=None)

    def runs_of_blocks(self) -> list[range]:
        """Of each stage all blocks but the first, unless that keeps the shape, too."""
        ends = list(accumulate(self.layers))
        firsts = [end - num_blocks for end, num_blocks in zip(ends, self.layers, strict=True)]
        keeps_shape = BLOCKS[self.block].expansion == 1  # in the first stage, whose input is the stem's
        return [
            range(first + (number > 0 or not keeps_shape), end)
            for number, (first, end) in enumerate(zip(firsts, ends, strict=True))
        ]

    @property
    def last_layers(self) -> tuple[str, ...]:
        return ("last.norm",)

    def natural_shape(self) -> tuple[int, ...]:
        """The shape of a sample when the data does not say."""
        return (3, self.image_size, self.image_size)

    def make(self, spec: DataSpec) -> ResNet:
        """The model for this data, whatever its image size. Its tensors hold no values yet: see `initialise`.

        Raises:
            BadInput: the data are not images, or have more classes than the configuration pins.
        """
        spec.check_modality(self.modality)
        num_classes = self.num_classes or spec.num_classes
        holds = f"at least {spec.num_classes}, the data's classes: null follows the data"
        require(num_classes >= spec.num_classes, "model.num_classes", num_classes, holds)
        return ResNet(self, spec.shape[0], num_classes)


@final
class ResNet(OwnModule):
    """A classifier of images (He et al., 2016). A bottleneck has its stride on its 3x3, as in torchvision."""

    def __init__(self, config: ResNetConfig, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.num_blocks_of_last_stage = config.layers[-1]
        self.last_gamma = 0.0 if config.zero_init_last_gamma else 1.0
        self.fill = FILLS[config.initialisation]
        self.memory_format = memory_format(config)
        self.stem = make_stem(config, num_channels)
        self.blocks = make_blocks(config)
        self.dropout = nn.Dropout(config.dropout)
        last_width = config.width * 2 ** (len(config.layers) - 1)
        self.head = nn.Linear(last_width * BLOCKS[config.block].expansion, num_classes)

    def forward(self, images_nchw: Tensor) -> Tensor:
        """Images (n, c, h, w) to logits (n, k)."""
        x_nchw = self.stem(images_nchw.contiguous(memory_format=self.memory_format))
        for block in self.blocks:
            x_nchw = block(x_nchw)
        return self.after_blocks(x_nchw)

    def after_blocks(self, x_nchw: Tensor) -> Tensor:
        """To logits (n, k)."""
        return self.head(self.dropout(x_nchw.mean((2, 3))))

    def tail(self) -> Tail | None:
        """Of the blocks of the last stage, which are as wide as the head."""
        return Tail(self.found_blocks().blocks[-self.num_blocks_of_last_stage :], "after_blocks")

    def branches(self) -> tuple[tuple[str, ...], ...]:
        """Of each block the last of the convolutions beside the shortcut."""
        return tuple((f"{block}.last",) for block in self.found_blocks().blocks)

    @torch.no_grad()
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one tensor in place with its initial value.

        Convolutions follow the configuration, the head is N(0, 0.01), norms start as the identity. The last
        norm of a block may start at zero, and so the block as its shortcut (Goyal et al., 2017).

        Args:
            name: the dotted name in `named_parameters()` or `named_buffers()`.
            generator: on the device of `tensor`.

        Raises:
            KeyError: no tensor of this model has this name.
        """
        match name.split("."):
            case [*_, "bias" | "running_mean" | "num_batches_tracked"]:
                tensor.zero_()
            case [*_, "last", "norm", "weight"]:
                tensor.fill_(self.last_gamma)
            case [*_, "norm", "weight" | "running_var"]:
                tensor.fill_(1.0)
            case ["head", "weight"]:
                tensor.normal_(0.0, HEAD_STD, generator=generator)
            case [*_, "conv", "weight"]:
                # Drawn into a contiguous tensor and then copied, so that values don't depend on the strides.
                drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                tensor.copy_(self.fill(drawn, generator=generator))
            case _:
                raise KeyError(name)


@final
class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (n, c, h, w) to (n, c', h / stride, w / stride)."""

    expansion: ClassVar[int] = 1  # channels that it returns per `width`
    convolutions: ClassVar[tuple[str, ...]] = ("first", "last")

    def __init__(self, config: ResNetConfig, width_in: int, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(config, width_in, inner, 3, stride)
        self.last = ConvNorm(config, inner, width, 3)
        self.shortcut = make_shortcut(config, width_in, width, stride)
        self.activation = nn.ReLU(config.in_place)

    def forward(self, x_nchw: Tensor) -> Tensor:
        y_nchw = self.last(self.activation(self.first(x_nchw)))
        # The sum is a new tensor, so that an activation in place never overwrites the input of the block.
        return self.activation(y_nchw + self.shortcut(x_nchw))


@final
class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: (n, c, h, w) to (n, c', h / stride, w / stride)."""

    expansion: ClassVar[int] = 4  # channels that it returns per `width`
    convolutions: ClassVar[tuple[str, ...]] = ("first", "middle", "last")

    def __init__(self, config: ResNetConfig, width_in: int, inner: int, width: int, stride: int) -> None:
        super().__init__()
        width_out = width * self.expansion
        self.first = ConvNorm(config, width_in, inner, 1)
        self.middle = ConvNorm(config, inner, inner, 3, stride)
        self.last = ConvNorm(config, inner, width_out, 1)
        self.shortcut = make_shortcut(config, width_in, width_out, stride)
        self.activation = nn.ReLU(config.in_place)

    def forward(self, x_nchw: Tensor) -> Tensor:
        y_nchw = self.last(self.activation(self.middle(self.activation(self.first(x_nchw)))))
        # The sum is a new tensor, so that an activation in place never overwrites the input of the block.
        return self.activation(y_nchw + self.shortcut(x_nchw))


@final
class ConvNorm(nn.Module):
    """A convolution and the norm that follows it, which stands in for the bias."""

    def __init__(self, config: ResNetConfig, width_in: int, width: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, size, stride, padding=size // 2, bias=False)
        # A new parameter, since `Module.to(memory_format=)` fails on fake tensors (torch 2.13).
        weight = self.conv.weight.detach().contiguous(memory_format=memory_format(config))
        self.conv.weight = nn.Parameter(weight)
        self.norm = NORMS[config.norm](width)

    def forward(self, x_nchw: Tensor) -> Tensor:
        return self.norm(self.conv(x_nchw))


@final
class FrozenNorm(nn.Module):
    """A batch norm that never changes: four buffers per channel, nothing kept for the backward but the scale.

    Meant for fine-tuning: the tensors of a trained batch norm fit in by name.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(num_channels))

    def forward(self, x_nchw: Tensor) -> Tensor:
        scale_c = self.weight * (self.running_var + EPSILON).rsqrt()
        shift_c = self.bias - self.running_mean * scale_c
        scale_c11, shift_c11 = (values.to(x_nchw.dtype)[:, None, None] for values in (scale_c, shift_c))
        return torch.addcmul(shift_c11, x_nchw, scale_c11)


def make_stem(config: ResNetConfig, num_channels: int) -> nn.Sequential:
    """What comes before the blocks: (n, c, h, w) to (n, width, h', w')."""
    size, stride, pool = {
        StemKind.full: (3, 1, nn.Identity()),
        StemKind.half: (3, 2, nn.Identity()),
        StemKind.quarter: (7, 2, nn.MaxPool2d(3, stride=2, padding=1)),
    }[config.stem]
    convolution = ConvNorm(config, num_channels, config.width, size, stride)
    return nn.Sequential(convolution, nn.ReLU(config.in_place), pool)


def make_blocks(config: ResNetConfig) -> nn.ModuleList:
    """All blocks of all stages; from the second stage on, the first block of each halves the image."""
    blocks = nn.ModuleList()
    width_in = config.width
    for stage, num_blocks in enumerate(config.layers):
        width, inner = config.width * 2**stage, config.inner_channels * 2**stage
        for index in range(num_blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(BLOCKS[config.block](config, width_in, inner, width, stride))
            width_in = width * BLOCKS[config.block].expansion
    return blocks


def make_shortcut(config: ResNetConfig, width_in: int, width_out: int, stride: int) -> nn.Module:
    """The input itself, or a 1x1 convolution of it where a block changes its shape."""
    same = width_in == width_out and stride == 1
    return nn.Identity() if same else ConvNorm(config, width_in, width_out, 1, stride)


def memory_format(config: ResNetConfig) -> torch.memory_format:
    """How images and the weights of convolutions lie in memory."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def group_norm(num_channels: int) -> nn.GroupNorm:
    """A group norm of as many groups as divide both the channels and the usual number."""
    return nn.GroupNorm(math.gcd(GROUPS, num_channels), num_channels)


BLOCKS: dict[BlockKind, type[BasicBlock | Bottleneck]] = {
    BlockKind.basic: BasicBlock,
    BlockKind.bottleneck: Bottleneck,
}
NORMS: dict[NormKind, Callable[[int], nn.Module]] = {
    NormKind.batch: nn.BatchNorm2d,
    NormKind.group: group_norm,
    NormKind.frozen: FrozenNorm,
}
FILLS: dict[Initialisation, Callable[..., Tensor]] = {
    Initialisation.kaiming: partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    Initialisation.xavier: nn.init.xavier_uniform_,
}
