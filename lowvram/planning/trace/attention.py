"""Runs scaled_dot_product_attention on fake CPU tensors with the kernel that torch would choose on a card.

The choice follows PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13 (select_sdp_backend):
the first kernel in the card's order of preference that accepts the arguments. A test compares it with torch's own
choice on emulated cards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import FakeTensor
from lowvram.compat.torch_ops import AttentionOps
from lowvram.core.device import Card

ATEN = torch.ops.aten
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # too small for flash's backward pass with wide heads


@final
@dataclass(frozen=True)
class Call:
    """The arguments of scaled_dot_product_attention. Query (b, n, s, c), key (b, m, t, c), value (b, m, t, d)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool  # enable_gqa: whether keys and values may have fewer heads

    @property
    def widths(self) -> tuple[int, int]:
        """The width of a head, of queries and keys (c) and of values (d)."""
        return self.query.shape[-1], self.value.shape[-1]

    @property
    def needs_gradient(self) -> bool:
        return any(tensor.requires_grad for tensor in (self.query, self.key, self.value))

    @property
    def is_16_bit(self) -> bool:
        return self.query.dtype in SIXTEEN_BIT

    @property
    def can_be_fused(self) -> bool:
        """Whether tensors have the four dimensions that fused kernels ask for, the last of them without gaps."""
        inputs = (self.query, self.key, self.value)
        masks = () if self.mask is None else (self.mask,)
        return all(tensor.dim() == 4 for tensor in inputs) and all(each.stride(-1) == 1 for each in (*inputs, *masks))

    @property
    def has_same_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]


def attention(
    card: Card,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output (b, n, s, d) of the kernel that torch would choose on `card`; arguments as in torch.nn.functional. For
    real tensors, on which a model is tried out while it is planned, that of the kernel that runs everywhere."""
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kernel = kernel_for(card, call) if isinstance(query, FakeTensor) else unfused
    return kernel(call)


def takes_flash(card: Card, query: Tensor, key: Tensor, value: Tensor, dropout: float, is_grouped: bool) -> bool:
    """As core/attention.py has it, on `card`; False for real tensors."""
    call = Call(query, key, value, None, dropout, False, None, is_grouped)
    return isinstance(query, FakeTensor) and call.can_be_fused and flash_can(card, call)


def kernel_for(card: Card, call: Call) -> Callable[[Call], Tensor]:
    """The first kernel that takes the call. The last one, which keeps the matrix of all pairs, takes any."""
    if not call.can_be_fused:
        return unfused
    order = [(flash, flash_can), (efficient, efficient_can)]
    if card.capability in (HOPPER, BLACKWELL):  # elsewhere it comes after those, and after `unfused`
        order.insert(0, (cudnn, cudnn_can))
    return next((kernel for kernel, can in order if can(card, call)), unfused)


def cudnn_can(card: Card, call: Call) -> bool:
    """check_cudnn_tensor_shapes and its neighbours, with the cuDNN of torch 2.13."""
    most = 256 if card.capability == HOPPER else 128
    is_mask_fixed = call.mask is None or not call.mask.requires_grad
    has_width = all(width <= most and width % 8 == 0 for width in call.widths)
    return call.is_16_bit and call.dropout == 0 and is_mask_fixed and has_width and call.key.shape[-2] > 1


def flash_can(card: Card, call: Call) -> bool:
    if card.capability < AMPERE or not call.is_16_bit or call.mask is not None:
        return False
    width, value_width = call.widths
    is_even = not call.is_causal or call.query.shape[-2] == call.key.shape[-2]
    is_wide = 192 < width <= 224 or (width > 224 and call.dropout > 0)
    is_hard = is_wide and card.capability in SMALL_SHARED_MEMORY and call.needs_gradient
    return is_even and width == value_width <= 256 and not is_hard


def efficient_can(card: Card, call: Call) -> bool:
    is_known = call.query.dtype in (torch.float32, torch.float16)
    if not (is_known or (call.query.dtype is torch.bfloat16 and card.capability >= AMPERE)):
        return False
    multiple = 8 if call.is_16_bit else 4 if card.capability >= AMPERE else 1  # the alignment for tensor cores
    return not call.is_grouped and call.has_same_heads and all(width % multiple == 0 for width in call.widths)


def cudnn(call: Call) -> Tensor:
    bias = None if call.mask is None else as_numbers(call.mask, call.query.dtype)
    is_needed = torch.is_grad_enabled() and call.needs_gradient
    args = (call.query, call.key, call.value, bias, is_needed, call.dropout, call.is_causal, False)
    return AttentionOps.CUDNN.default(*args, scale=call.scale)[0]


def flash(call: Call) -> Tensor:
    width, padded = call.widths[0], [to_multiple(tensor, 8) for tensor in (call.query, call.key, call.value)]
    scale = width**-0.5 if call.scale is None else call.scale
    return AttentionOps.FLASH.default(*padded, call.dropout, call.is_causal, scale=scale)[0][..., :width]


def efficient(call: Call) -> Tensor:
    bias = None if call.mask is None else as_bias(call.mask, call.query)
    is_needed = torch.is_grad_enabled() and call.needs_gradient
    args = (call.query, call.key, call.value, bias, is_needed, call.dropout, call.is_causal)
    return AttentionOps.EFFICIENT.default(*args, scale=call.scale)[0]


def unfused(call: Call) -> Tensor:
    mask = None if call.mask is None else as_numbers(call.mask, call.query.dtype)  # booleans would be added as 0 and 1
    args = (call.query, call.key, call.value, mask, call.dropout, call.is_causal)
    return AttentionOps.MATH.default(*args, scale=call.scale, enable_gqa=call.is_grouped)[0]


def to_multiple(tensor: Tensor, multiple: int) -> Tensor:
    """The tensor with its last dimension padded with zeros to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return ATEN.constant_pad_nd.default(tensor, [0, missing]) if missing else tensor


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to the scores: 0 or -inf for a boolean mask."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as the memory-efficient kernel takes it: (b, n, s, t) numbers to add, whose rows are padded in memory to a
    multiple of 8."""
    length = mask.shape[-1]
    bias = to_multiple(as_numbers(mask, query.dtype), 8)[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
