"""Temporary memory that operators allocate inside their kernels on a card, and which a dispatch mode doesn't see.

Each rule follows a kernel of torch 2.13; tests/planning/trace/test_scratch.py compares them with torch's allocator
on emulated cards. Workspaces of cuDNN's convolutions aren't known, so there is no rule for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowvram.compat.torch_ops import AttentionOps, CublasOps
from lowvram.core import host
from lowvram.core.device import Card
from lowvram.planning.trace.attention import SIXTEEN_BIT, SMALL_SHARED_MEMORY
from lowvram.planning.trace.reductions import WARP, Reduction, columns_of, product, reduction_of

ATEN = torch.ops.aten
CUBLAS_OPS = CublasOps.ALL  # the first of them in each thread allocates cuBLAS's workspace
FP32_BYTES, INDEX_BYTES = 4, 8
MOST_ROWS = 64 * 1024  # that a norm's backward pass sums without partial sums
# Bytes of a partial result: a pair of value and index (argmax); mean, sum of squares and two counts (variance).
PAIR_BYTES, MOMENTS_BYTES = 16, 16

Group = Sequence[int | Reduction]  # bytes; allocated in this order after the results, freed in the opposite order
Rule = Callable[[Card, Sequence[Any], Mapping[str, Any]], Sequence[Group]]


def scratch_of(card: Card, operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """What an operator allocates while it runs: groups of allocations, each freed before the next one is made.

    Args:
        args, named: as a dispatch mode gets them.
    """
    rule = RULES.get(operator.overloadpacket)
    return () if rule is None or host.holds(args[0]) else rule(card, args, named)


def argument(args: Sequence[Any], named: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def reduction(bytes_of: Callable[[torch.dtype], int], place: int = 1) -> Rule:
    """The rule of an operator that reduces its first argument.

    Args:
        bytes_of: the bytes of a partial result, by the format of what is reduced.
        place: the position of the dimensions among the arguments.
    """

    def rule(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
        dims = argument(args, named, place, "dim")
        dims = [dims] if isinstance(dims, int) else dims
        return [[reduction_of(args[0], dims, bytes_of(args[0].dtype))]]

    return rule


def sum_bytes(dtype: torch.dtype) -> int:
    """The bytes of a partial sum: narrow floating-point numbers are summed in fp32, integers in int64."""
    return max(FP32_BYTES, dtype.itemsize) if dtype.is_floating_point else 8


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def softmax_into(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """softmax with `out=` first copies its input to the wanted format, except from fp16 to fp32 (SoftMax.cpp). Without
    `out=` the trace sees that copy itself."""
    source, dtype = args[0], argument(args, named, 2, "dtype") or args[0].dtype
    is_direct = dtype is source.dtype or (source.dtype is torch.float16 and dtype is torch.float32)
    return () if is_direct else [[source.numel() * dtype.itemsize]]


def norm_of_copy(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """A layer norm makes its input contiguous first (layer_norm_kernel.cu)."""
    return () if args[0].is_contiguous() else [[args[0].numel() * args[0].itemsize]]


def norm_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """With many short rows, blocks of 32 of them sum the gradients of weight and bias (layer_norm_kernel.cu,
    LaunchGammaBetaBackwardCUDAKernel)."""
    source, (width, *others) = args[1], reversed(args[2])
    num_columns = width * product(others)
    num_rows, most_warps = source.numel() // max(1, num_columns), (card.num_multiprocessors or 0) / 2
    if num_rows <= MOST_ROWS or num_columns // WARP >= most_warps:
        return ()
    sums = -(-num_rows // WARP)
    last = Reduction(sums, num_columns, FP32_BYTES, False, False, columns_of([num_columns]), 0)
    return [[*[sums * num_columns * source.itemsize] * 2, last]]


def convolution(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    return [copies_of(args[0], args[1])]


def convolution_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    gradient, source, weight, has_bias = *args[:3], args[-1][-1]
    bias = [reduction_of(gradient, [0, *range(2, gradient.dim())], sum_bytes(gradient.dtype))] if has_bias else []
    return [copies_of(source, weight, gradient), bias]


def copies_of(source: Tensor, weight: Tensor, *others: Tensor) -> Group:
    """cuDNN is given all in one format: channels_last if the input or the weight has it (ConvUtils.h,
    cudnn_conv_suggest_memory_format)."""
    is_last = any(tensor.dim() == 4 and is_channels_last(tensor) for tensor in (source, weight))
    layout = torch.channels_last if is_last else torch.contiguous_format
    tensors = (*others, source, weight)
    return [tensor.numel() * tensor.itemsize for tensor in tensors if not tensor.is_contiguous(memory_format=layout)]


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def added_at(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """Sums at given places are made in their order: the places, their numbers, and both sorted (Indexing.cu,
    index_put_with_sort_kernel). Without `accumulate` nothing is sorted."""
    places = [place for place in args[1] if place is not None]
    if not argument(args, named, 3, "accumulate", False):
        return ()
    number, values = product(torch.broadcast_shapes(*(place.shape for place in places))), args[2]
    copy = [] if values.is_contiguous() else [values.numel() * values.itemsize]
    return [[number * INDEX_BYTES, *copy, *[number * INDEX_BYTES] * 3]]


def rolled(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """Dimensions are rolled one after another (TensorTransformations.h, roll_common)."""
    num_dims = len(argument(args, named, 2, "dims", ()))
    return [[args[0].numel() * args[0].itemsize] * min(2, num_dims - 1)] if num_dims > 1 else ()


def flash_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """With few queries, the keys are split into parts, whose results are kept in fp32 and then added (flash_api.cpp,
    set_params_splitkv)."""
    query, key, dropout = args[0], args[1], argument(args, named, 3, "dropout_p", 0.0)
    batch, heads, length, width = query.shape
    num_parts = 1 if dropout else num_parts_of(card, batch * heads * -(-length // 64), key.shape[-2], width)
    if num_parts == 1:
        return ()
    rows = num_parts * batch * heads * length * FP32_BYTES
    return [[rows, rows * rounded(width, 32)]]


def num_parts_of(card: Card, num_blocks: int, num_keys: int, width: int) -> int:
    """Into how many parts flash attention splits the keys (num_splits_heuristic).

    Args:
        num_blocks: of 64 queries, over all heads.
    """
    places = 2 * (card.num_multiprocessors or 0)  # thread blocks that run at a time
    if num_blocks >= 0.8 * places:
        return 1
    num_key_blocks = -(-num_keys // (256 if width <= 64 else 128 if width <= 128 else 64))
    efficiency = {}
    for parts in range(1, min(128, places, num_key_blocks) + 1):
        if parts == 1 or -(-num_key_blocks // parts) != -(-num_key_blocks // (parts - 1)):
            waves = num_blocks * parts / places
            efficiency[parts] = waves / -(-num_blocks * parts // places)
    best = max(efficiency.values())
    return next(parts for parts, share in efficiency.items() if share >= 0.85 * best)


def flash_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """Row sums and the query's gradient in fp32; with grouped-query attention, also gradients of keys and values for
    each query head (flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * rounded(length, 128) * FP32_BYTES
    expanded = batch * key.shape[2] * heads * width * key.dtype.itemsize
    return [[rows, rows * rounded(width, 32), *([] if key.shape[1] == heads else [expanded, expanded])]]


def cudnn_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """Row sums and the query's gradient in fp32, in one allocation (cudnn-frontend's SDPA_backward)."""
    batch, heads, length, width = args[1].shape
    return [[batch * heads * length * (width + 1) * FP32_BYTES]]


def efficient_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """16-bit outputs of wide heads are accumulated in fp32."""
    query, width = args[0], args[2].shape[-1]
    is_summed = query.dtype in SIXTEEN_BIT and width > 128
    return [[query[..., 0].numel() * width * FP32_BYTES]] if is_summed else ()


def efficient_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Group]:
    """Row sums, and an fp32 accumulator of the query's gradient; for 16-bit wide heads also of those of key and value
    (attention_backward.cu; workspace_elements_gq and its neighbours in kernel_backward.h). For fp32 the row sums are
    made from a product of output and gradient, which is a temporary tensor."""
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    rows = batch * heads * length * FP32_BYTES
    is_16_bit = query.dtype in SIXTEEN_BIT
    width = rounded(width, 64) if width <= 64 or width > 128 else 128
    sums = batch * heads * rounded(length, 64) * width * FP32_BYTES
    is_wide = width > 128 or (width > 96 and args[1].shape[-1] > 96 and card.capability in SMALL_SHARED_MEMORY)
    both = 2 * batch * heads * rounded(key.shape[2], 64) * width * FP32_BYTES if is_16_bit and is_wide else 0
    first = [] if is_16_bit else [[rows * value.shape[-1], rows]]
    return [*first, [rows, sums + both]]


RULES: dict[Any, Rule] = {
    **dict.fromkeys((ATEN.sum, ATEN.mean, ATEN.prod), reduction(sum_bytes)),
    **dict.fromkeys((ATEN.amax, ATEN.amin, ATEN.max, ATEN.min), reduction(lambda dtype: dtype.itemsize)),
    **dict.fromkeys((ATEN.any, ATEN.all), reduction(lambda dtype: 1)),
    **dict.fromkeys((ATEN.argmax, ATEN.argmin), reduction(lambda dtype: PAIR_BYTES)),
    **dict.fromkeys((ATEN.var, ATEN.std, ATEN.var_mean), reduction(lambda dtype: MOMENTS_BYTES)),
    **dict.fromkeys((ATEN.linalg_vector_norm, ATEN.norm), reduction(sum_bytes, place=2)),
    **dict.fromkeys((ATEN.softmax, ATEN.log_softmax), softmax_into),
    ATEN.native_layer_norm: norm_of_copy,
    ATEN.native_layer_norm_backward: norm_backward,
    ATEN.convolution: convolution,
    ATEN.convolution_backward: convolution_backward,
    **dict.fromkeys((ATEN.index_put, ATEN.index_put_), added_at),
    ATEN.roll: rolled,
    AttentionOps.FLASH: flash_forward,
    AttentionOps.FLASH_BACKWARD: flash_backward,
    AttentionOps.CUDNN_BACKWARD: cudnn_backward,
    AttentionOps.EFFICIENT: efficient_forward,
    AttentionOps.EFFICIENT_BACKWARD: efficient_backward,
}
