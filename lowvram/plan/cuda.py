"""A CPU's tensors without memory, treated by torch as a CUDA card would treat its own.

Where PyTorch asks whether a tensor is on a card, what it does on a card is registered for the CPU, for the length of a
context: autocast's lists, which kernel attention takes, dropout's mask, softmax of 16 bits. This changes the whole
process while it lasts, so it belongs into one that plans and computes nothing. Afterwards the CPU's own ways are back.
The sources are PyTorch's ATen/autocast_mode.h, native/transformers/cuda/sdp_utils.cpp, native/{Dropout,SoftMax}.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library, _scoped_library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map

from lowvram.core.device import Card
from lowvram.models import transformer

ATEN = torch.ops.aten
AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# Autocast's lists for CUDA, torch 2.13. First what casts to fewer bits: the CPU does that too for these, ...
LOWER_ON_BOTH = """_convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention""".split()
# ... and not for these.
LOWER = """_convolution convolution prelu addmv addr einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention""".split()
FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa""".split()
FP32_OUT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()


@contextmanager
def played(card: Card) -> Iterator[None]:
    """Inside it the CPU's tensors are treated as those of `card`."""
    on_card = patch.object(transformer, "is_on_cpu", lambda tensor: False)
    with _scoped_library("aten", "IMPL") as library, warnings.catch_warnings(), on_card:
        warnings.simplefilter("ignore")  # of kernels that are replaced
        register_autocast(library)
        replace = {
            "scaled_dot_product_attention": partial(attention, card),
            "dropout": dropout,
            "softmax.int": partial(softmax, ATEN._softmax.default),
            "log_softmax.int": partial(softmax, ATEN._log_softmax.default),
        }
        for name, kernel in replace.items():
            library.impl(name, kernel, "AutogradCPU")
        yield


def register_autocast(library: Library) -> None:
    """What the CPU's autocast casts and the card's doesn't falls through; the rest is cast as on the card."""
    made = [(LOWER, lower), (FP32, fp32), (FP32_OUT, fp32_out), (WIDEST, widest)]
    kernels = {name: partial(way, overload(name)) for names, way in made for name in names}
    kernels |= {name: partial(fp32_out, overload(other)) for name, other in FP32_NORM.items()}
    for name in torch._C._dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        is_cast = name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
        if is_cast and short not in LOWER_ON_BOTH and short not in kernels:
            library.impl(short, fallthrough_kernel, "AutocastCPU")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "AutocastCPU")


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, which = name.partition(".")
    return getattr(getattr(ATEN, packet), which or "default")


def is_cast(value: Any) -> bool:
    """Whether autocast touches it."""
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return is_number and value.dtype is not torch.float64 and value.device.type == "cpu"


def called(operator: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """With its tensors in `dtype`, and no more casts inside."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_cast(value) else value

    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEY):
        return operator(*tree_map(cast, args), **tree_map(cast, kwargs))


def lower(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Without autocast's cache of weights, which only its own kernels reach."""
    return called(operator, torch.get_autocast_dtype("cpu"), args, kwargs)


def fp32(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return called(operator, torch.float32, args, kwargs)


def fp32_out(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operator does it itself: inputs aren't cast, unless the caller asks for another format."""
    given = dict(zip([argument.name for argument in operator._schema.arguments], args, strict=False)) | kwargs
    if is_cast(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEY):
        return operator(**given)


def widest(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the widest format of its inputs, at least autocast's."""
    dtype = torch.get_autocast_dtype("cpu")
    for value in tree_leaves((args, kwargs)):
        if is_cast(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return called(operator, dtype, args, kwargs)


def softmax(operator: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Probabilities, or their logarithms, in `dtype`. From fp16 the kernel writes fp32 in one go; of bf16 torch (2.13)
    makes a copy in fp32 first."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return operator(input, dim, True)
    return operator(input if dtype is None else input.to(dtype), dim, False)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """A card keeps a mask of one byte for each number, a CPU one of the input's format."""
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
    """By the first kernel that can: flash, memory-efficient, or products that keep a matrix of all pairs."""
    is_dense = all(tensor.dim() == 4 for tensor in (query, key, value))
    if is_dense and flash_can(card, query, key, value, attn_mask, is_causal):
        width, padded = query.shape[-1], [to_multiple(tensor, 8) for tensor in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        flash = ATEN._scaled_dot_product_flash_attention.default
        return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
    if is_dense and not enable_gqa and efficient_can(card, query, key, value):
        is_needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        efficient = ATEN._scaled_dot_product_efficient_attention.default
        bias = None if attn_mask is None else as_bias(attn_mask, query)
        return efficient(query, key, value, bias, is_needed, dropout_p, is_causal, scale=scale)[0]
    products = ATEN._scaled_dot_product_attention_math.default
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
    """Its last dimension padded with zeros."""
    missing = -tensor.shape[-1] % multiple
    return ATEN.constant_pad_nd.default(tensor, [0, missing]) if missing else tensor


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as numbers that are added, its rows padded to what the kernel can read, one for each head."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    length = mask.shape[-1]
    bias = to_multiple(mask, 16)[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
