"""Makes torch treat fake CPU tensors as it treats tensors on a CUDA card.

Where PyTorch treats CUDA tensors differently, `acts_as_card` registers the CUDA behaviour for the CPU: autocast's
lists, the choice of attention kernel, dropout's mask, softmax of 16-bit numbers, streams. That changes the whole
process until the context ends, so use it only in a process that plans and computes nothing. The sources are PyTorch's
native/transformers/cuda/sdp_utils.cpp and native/{Dropout,SoftMax}.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lowvram.compat.torch_cuda import streams_replaced
from lowvram.compat.torch_ops import AttentionOps, NormOps, kernels_replaced
from lowvram.core import host
from lowvram.core.device import Card
from lowvram.models import attention as own_attention
from lowvram.planning.trace.autocast import register_autocast

ATEN = torch.ops.aten


class FakeStream:
    """A stream or event that does nothing; copies count as finished whenever they are queried."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: FakeStream) -> None: ...

    def wait_event(self, event: FakeStream) -> None: ...

    def record(self, stream: FakeStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


STREAMS: dict[str, Any] = {
    "Stream": FakeStream,
    "Event": FakeStream,
    "current_stream": FakeStream,
    "stream": lambda stream: nullcontext(),
}


@contextmanager
def acts_as_card(card: Card) -> Iterator[None]:
    """Inside it CPU tensors are treated as tensors on `card`."""
    with kernels_replaced() as library, warnings.catch_warnings(), ExitStack() as undo:
        undo.enter_context(patch.object(own_attention, "is_on_cpu", lambda tensor: False))
        undo.enter_context(patch.object(host, "copies_overlap", lambda device: True))
        undo.enter_context(streams_replaced(STREAMS))
        warnings.simplefilter("ignore")  # of kernels that are replaced
        register_autocast(library)
        replace = {
            "scaled_dot_product_attention": partial(attention, card),
            "dropout": dropout,
            "softmax.int": partial(softmax, NormOps.SOFTMAX.default),
            "log_softmax.int": partial(softmax, NormOps.LOG_SOFTMAX.default),
        }
        for name, kernel in replace.items():
            library.impl(name, kernel, "AutogradCPU")
        yield


def softmax(operator: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax or log_softmax in `dtype`. From fp16 the kernel writes fp32 directly; bf16 is first copied to fp32 (torch
    2.13)."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return operator(input, dim, True)
    return operator(input if dtype is None else input.to(dtype), dim, False)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """On a card dropout keeps a mask of one byte per element, on a CPU one in the input's format."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return ATEN.native_dropout.default(input, p, train)[0] if p < 1 else input * 0


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
    """The first kernel that supports the arguments: flash, memory-efficient, or math, which keeps a (t, t) matrix."""
    is_dense = all(tensor.dim() == 4 for tensor in (query, key, value))
    if is_dense and flash_can(card, query, key, value, attn_mask, is_causal):
        width, padded = query.shape[-1], [to_multiple(tensor, 8) for tensor in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        flash = AttentionOps.FLASH.default
        return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
    if is_dense and not enable_gqa and efficient_can(card, query, key, value):
        is_needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        efficient = AttentionOps.EFFICIENT.default
        bias = None if attn_mask is None else as_bias(attn_mask, query)
        return efficient(query, key, value, bias, is_needed, dropout_p, is_causal, scale=scale)[0]
    products = AttentionOps.MATH.default
    return products(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def flash_can(card: Card, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if card.capability < (8, 0) or query.dtype not in (torch.float16, torch.bfloat16) or mask is not None:
        return False
    width = query.shape[-1]
    is_even = not is_causal or query.shape[-2] == key.shape[-2]
    is_hard = width > 192 and card.capability in ((8, 6), (8, 9), (12, 0), (12, 1)) and query.requires_grad
    return is_even and width == key.shape[-1] == value.shape[-1] <= 256 and not is_hard


def efficient_can(card: Card, query: Tensor, key: Tensor, value: Tensor) -> bool:
    is_known = query.dtype in (torch.float32, torch.float16)
    if card.capability < (5, 0) or not (is_known or (query.dtype is torch.bfloat16 and card.capability >= (8, 0))):
        return False
    is_narrow = query.dtype.itemsize == 2
    multiple = (8 if is_narrow else 4) if card.capability >= (8, 0) else (4 if is_narrow else 1)
    widths = (query.shape[-1], value.shape[-1])
    has_same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    return has_same_heads and query.shape[-1] == key.shape[-1] and all(width % multiple == 0 for width in widths)


def to_multiple(tensor: Tensor, multiple: int) -> Tensor:
    """The tensor with its last dimension padded with zeros to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return ATEN.constant_pad_nd.default(tensor, [0, missing]) if missing else tensor


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as the kernel takes it: numbers to add, in rows padded to a multiple of 16, one for each head."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    length = mask.shape[-1]
    bias = to_multiple(mask, 16)[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
