"""Weights of 4 bits: NF4, whose 16 levels are quantiles of a normal distribution, with a scale for each block of 64.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E. Codes and scales are the same as
bitsandbytes' to the bit. We use neither bitsandbytes' layers, which quantize when real tensors move to the device and
so can't be planned, nor torchao's NF4 tensor, which moves to another module from version to version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible
from lowvram.core.layers import PackedWeight
from lowvram.core.rounds import followed

BLOCK = 64  # weights that share a scale: the largest absolute value among them
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BLOCKS_AT_ONCE = 2**14  # bounds the temporary memory of `pack`


class InNF4(NamedTuple):
    """A quantized tensor. A byte holds two weights, the first one in its upper half; the last block is padded with
    zeros."""

    codes: Tensor  # uint8 (32 · blocks,)
    scales: Tensor  # fp32 (blocks,)


def num_blocks(shape: torch.Size) -> int:
    return -(-shape.numel() // BLOCK)


def pack(weight: Tensor) -> InNF4:
    """Quantize a tensor of any shape: each weight to the nearest level."""
    levels = torch.tensor(LEVELS, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    flat, missing = weight.flatten().float(), -weight.numel() % BLOCK
    blocks = (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)  # padding by nothing would copy too
    scales = torch.empty(len(blocks), device=weight.device)
    codes = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
    for first in followed(range(0, len(blocks), BLOCKS_AT_ONCE)):
        some = slice(first, first + BLOCKS_AT_ONCE)
        scales[some] = blocks[some].abs().amax(1)
        relative = blocks[some] / scales[some, None].clamp(min=torch.finfo(torch.float32).tiny)
        nearest = torch.bucketize(relative, borders, out_int32=True)
        codes[some] = nearest[:, ::2] * 16 + nearest[:, 1::2]
    return InNF4(codes.flatten(), scales)


def pairs() -> Tensor:
    """The two levels that each byte of codes stands for: fp32 (256, 2)."""
    levels, byte = torch.tensor(LEVELS), torch.arange(256)
    return torch.stack([levels[byte // 16], levels[byte % 16]], 1)


def unpack(packed: InNF4, pairs: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Dequantize: the weights in `dtype`, in which levels and scales are also multiplied.

    Args:
        pairs: `pairs()`, on the device of the codes.
    """
    blocks = F.embedding(packed.codes.int(), pairs.to(dtype)).view(-1, BLOCK)
    return blocks.mul_(packed.scales.to(dtype)[:, None]).view(-1)[: shape.numel()].view(shape)


class Product(ABC):
    """How a layer uses its weight."""

    @abstractmethod
    def of(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the layer."""

    @abstractmethod
    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of an input of this shape."""


@final
@dataclass(frozen=True)
class Linear(Product):
    """nn.Linear; transposed: transformers' Conv1D, a linear layer whose weight is (in, out)."""

    transposed: bool = False

    def of(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight.T if self.transposed else weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ (weight.T if self.transposed else weight)


@final
@dataclass(frozen=True)
class Convolution(Product):
    """nn.Conv2d with zeros around the image."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int

    def of(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        options = (self.stride, self.padding, self.dilation, self.groups)
        return conv2d_input(shape, weight, gradient, *options)


class ShapeAlone(Tensor):
    """Stands for a weight that has no values here. Computing with it would read memory that nobody has written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, Tensor) and type(leaf) is not cls for leaf in tree_leaves((args, kwargs))):
            raise Incompatible(
                "adapter=qlora keeps weights in 4 bits, and this model computes with the weight of a layer instead of"
                " calling the layer: choose adapter=freeze or adapter=none"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


@final
class FourBit(PackedWeight):
    """A layer whose weight is kept in NF4 and dequantized for each use: in the forward pass, and again in the backward
    pass, so that autograd saves no dequantized weight. The weight gets no gradient."""

    codes: Tensor
    scales: Tensor
    pairs: Tensor
    groups = 1  # of a convolution; peft reads it

    def __init__(self, layer: nn.Module, product: Product) -> None:
        """
        Args:
            layer: has a weight, and perhaps a bias, which is kept as it is. If the weight is on the device meta, it has
                no values yet, and `Values` fills the codes.
        """
        super().__init__()
        weight, bias = layer.get_parameter("weight"), dict(layer.named_parameters(recurse=False)).get("bias")
        self.shape, self.product, self.num_weights = weight.shape, product, weight.numel()
        self.register_parameter("bias", bias)
        blocks = num_blocks(weight.shape)
        # Not persistent: they follow from the weights that a run starts with, and `precision=bf16_pure` must not cast
        # them, as it casts all persistent buffers.
        codes = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(blocks, dtype=torch.float32, device=weight.device)
        pairs = torch.empty(256, 2, dtype=torch.float32, device=weight.device)
        for name, buffer in (("codes", codes), ("scales", scales), ("pairs", pairs)):
            self.register_buffer(name, buffer, persistent=False)
        if not weight.is_meta:  # of a module of the user's own
            self.keep(weight)

    @torch.no_grad()
    def keep(self, weight: Tensor) -> None:
        """Quantize these values."""
        packed = pack(weight.detach().float())
        self.codes.copy_(packed.codes)
        self.scales.copy_(packed.scales)
        self.pairs.copy_(pairs())

    @property
    def weight(self) -> Tensor:
        """A meta tensor, for code that reads only the shape and the dtype of a layer's weight."""
        return torch.empty(self.shape, dtype=torch.float32, device="meta").as_subclass(ShapeAlone)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight in `dtype`."""
        return unpack(InNF4(self.codes, self.scales), self.pairs, self.shape, dtype)

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        is_cast = torch.is_autocast_enabled(device_type) and input.dtype is not torch.float64
        dtype = torch.get_autocast_dtype(device_type) if is_cast else input.dtype
        fixed = (self.codes, self.scales, self.pairs, self.shape, self.product, dtype)
        return Multiply.apply(input, self.bias, *fixed)  # pyright: ignore[reportReturnType]


@final
class Multiply(torch.autograd.Function):
    """The forward and backward pass of a `FourBit` layer; the forward pass computes in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scales: Tensor,
        pairs: Tensor,
        shape: torch.Size,
        product: Product,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, pairs)
        ctx.shape, ctx.product, ctx.input_shape, ctx.input_dtype = shape, product, input.shape, input.dtype
        weight = unpack(InNF4(codes, scales), pairs, shape, dtype)
        return product.of(input.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        codes, scales, pairs = ctx.saved_tensors
        weight = unpack(InNF4(codes, scales), pairs, ctx.shape, gradient.dtype)
        input_gradient = (
            ctx.product.input_gradient(gradient, weight, ctx.input_shape) if ctx.needs_input_grad[0] else None
        )
        return (None if input_gradient is None else input_gradient.to(ctx.input_dtype), *[None] * 7)
