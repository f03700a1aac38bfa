"""Temporary memory that operators allocate inside their kernels on a card, and which a dispatch mode doesn't see.

Each rule follows a kernel of torch 2.13; tests/planning/trace/test_scratch.py compares them with torch's allocator
on emulated cards. Workspaces of cuDNN's convolutions aren't known, so there is no rule for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowvram.compat.torch_ops import AttentionOps, CublasOps, ManyOps, NormOps
from lowvram.core import host
from lowvram.core.device import Card
from lowvram.models.flex_attention import NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD
from lowvram.planning.trace.allocations import RESULT, Allocations, Kept, Result, Rule, argument
from lowvram.planning.trace.attention import SIXTEEN_BIT
from lowvram.planning.trace.attention_scratch import (
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
    flex_backward,
    flex_forward,
)
from lowvram.planning.trace.norm_sums import NormSum
from lowvram.planning.trace.reductions import (
    FP32_BYTES,
    INDEX_BYTES,
    MOST_THREADS,
    WARP,
    Reduction,
    power_of_two,
    product,
    reduction_of,
)
from lowvram.planning.trace.table_sums import SORT_BYTES, Pair, TableSum

ATEN = torch.ops.aten
CUBLAS_OPS = CublasOps.ALL  # the first of them in each thread allocates cuBLAS's workspace
LAST, FLAT = torch.channels_last, torch.contiguous_format
# Bytes of a partial result: a pair of value and index (argmax); mean, sum of squares and two counts (variance).
PAIR_BYTES, MOMENTS_BYTES = 16, 16
ROWS_OF_NORM, FEWEST_NORM_BLOCKS, MOST_NORM_BLOCKS = 16, 8, 128  # ELEMENTS_PER_THREAD, 8, MAX_H_BLOCK
CHUNK = 2**16  # elements of a tensor that a thread block of a `_foreach` operator takes


def scratch_of(card: Card, operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """What an operator allocates while it runs, beside its results.

    Args:
        args, named: as a dispatch mode gets them.
    """
    rule = RULES.get(operator.overloadpacket)
    if rule is None:
        return ()
    first = args[0][0] if isinstance(args[0], list) else args[0]
    return () if host.holds(first) else rule(card, args, named)


def reduction(bytes_of: Callable[[torch.dtype], int], place: int = 1) -> Rule:
    """The rule of an operator that reduces its first argument.

    Args:
        bytes_of: the bytes of a partial result, by the format of what is reduced.
        place: the position of the dimensions among the arguments.
    """

    def rule(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
        dims = argument(args, named, place, "dim")
        dims = [dims] if isinstance(dims, int) else dims
        return [[reduction_of(args[0], dims, bytes_of(args[0].dtype))]]

    return rule


def sum_bytes(dtype: torch.dtype) -> int:
    """The bytes of a partial sum: narrow floating-point numbers are summed in fp32, integers in int64."""
    return max(FP32_BYTES, dtype.itemsize) if dtype.is_floating_point else 8


def softmax_into(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """softmax with `out=` first copies its input to the wanted format, except from fp16 to fp32 (SoftMax.cpp). Without
    `out=` the trace sees that copy itself."""
    source, dtype = args[0], argument(args, named, 2, "dtype") or args[0].dtype
    is_direct = dtype is source.dtype or (source.dtype is torch.float16 and dtype is torch.float32)
    return () if is_direct else [[source.numel() * dtype.itemsize]]


def copies(*tensors: Tensor, layout: torch.memory_format = FLAT) -> list[int]:
    """The bytes of copies of those that don't have the layout yet."""
    return [tensor.numel() * tensor.itemsize for tensor in tensors if not tensor.is_contiguous(memory_format=layout)]


def norm_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """A layer or RMS norm makes its input contiguous first (layer_norm_kernel.cu)."""
    return [[*copies(args[0]), *[RESULT] * 3]]


def norm_backward(num_vectors: int) -> Rule:
    """With many short rows, blocks of 32 of them sum the gradients of weight and bias, before these are made
    (layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel).

    Args:
        num_vectors: of the norm: 2, or an RMS norm's weight alone.
    """

    def rule(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
        gradient, source, (width, *others) = args[0], args[1], reversed(args[2])
        num_columns = width * product(others)
        num_rows, most_warps = source.numel() // max(1, num_columns), (card.num_multiprocessors or 0) / 2
        made = [*copies(source), RESULT, *copies(gradient), *[RESULT] * num_vectors]
        if num_columns // WARP >= most_warps:
            return [made]
        sizes = (num_rows, num_columns, source.itemsize)
        sums, last = (NormSum(*sizes, is_last, has_bias=num_vectors > 1) for is_last in (False, True))
        return [[*made, sums, *[[last]] * num_vectors]]

    return rule


def batch_norm(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Mean, sum of squares and two counts of each thread block's rows (Normalization.cuh)."""
    return [[num_block_rows(args[0]) * 4 * FP32_BYTES]]


def batch_norm_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Two sums of each thread block's rows; the gradient of the input comes after them."""
    sums: Allocations = [num_block_rows(args[1]) * 2 * FP32_BYTES]
    return [[*[Result.LAST] * sum(args[-1][1:]), sums, Result.FIRST]]


def num_block_rows(images: Tensor) -> int:
    """How many partial results batch norm in channels_last makes: one for each channel and thread block in a column of
    them; 0 if a column has one block (flexible_launch_configs)."""
    if not is_channels_last(images):
        return 0
    num_channels = images.shape[1]
    num_rows = images.numel() // num_channels
    width = min(power_of_two(num_channels), WARP)
    height = min(power_of_two(-(-num_rows // ROWS_OF_NORM)), MOST_THREADS // width)
    num_blocks = min(-(-num_rows // (height * ROWS_OF_NORM)), MOST_NORM_BLOCKS)
    return num_channels * num_blocks if num_blocks >= FEWEST_NORM_BLOCKS else 0


def mask_first(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Dropout makes its mask before its output (Dropout.cu)."""
    return [[Result.LAST, Result.FIRST]]


def softmax_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """The product of gradient and output (SoftMax.cu, softmax_backward_cuda_out)."""
    gradient, output = args[:2]
    return [[output.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize]]


def safe_softmax(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Which scores are -inf, and in which rows all of them are (SoftMax.cpp)."""
    scores = args[0]
    return [[RESULT, [scores.numel(), scores.numel() // max(1, scores.shape[args[1]])]]]


def convolution(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """cuDNN is given input and weight in one format: channels_last if either of them has it (ConvUtils.h,
    cudnn_conv_suggest_memory_format)."""
    source, weight = args[:2]
    layout = LAST if is_channels_last(source) or is_channels_last(weight) else FLAT
    return [[*copies(source, layout=layout), RESULT, *copies(weight, layout=layout)]]


def convolution_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """The gradients of input, weight and bias, one after another; the first two have formats of their own
    (Convolution.cpp, convolution_backward; ConvShared.cpp, cudnn_convolution_backward)."""
    (gradient, source, weight), (has_source, has_weight, has_bias) = args[:3], args[-1]
    layout = LAST if is_channels_last(source) or (has_weight and is_channels_last(weight)) else FLAT
    input_layout = LAST if layout is LAST or is_channels_last(weight) else FLAT
    copied = [gradient.numel() * gradient.itemsize]
    is_moved = layout is not (LAST if is_channels_last(gradient) else FLAT)
    is_dense = is_moved or gradient.is_contiguous(memory_format=layout)
    again = [] if is_dense and input_layout is layout else copied
    of_source: Allocations = [RESULT, [*again, *copies(weight, layout=input_layout)]] if has_source else []
    of_weight: Allocations = [[*([] if is_dense else copied), RESULT]] if has_weight else []
    of_bias: Allocations = [RESULT, [bias_sum(gradient)]] if has_bias else []
    first = copies(source, layout=layout) if has_weight else []
    return [[*first, *(copied if is_moved else []), *of_source, *of_weight], of_bias]


def bias_sum(gradient: Tensor) -> Reduction:
    return reduction_of(gradient, [0, *range(2, gradient.dim())], sum_bytes(gradient.dtype))


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def added_at(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Sums at given places are made in their order: the places, their numbers, and both sorted (Indexing.cu,
    index_put_with_sort_kernel). Without `accumulate` nothing is sorted."""
    places = [place for place in args[1] if place is not None]
    if not argument(args, named, 3, "accumulate", False):
        return ()
    places_bytes = product(torch.broadcast_shapes(*(place.shape for place in places))) * INDEX_BYTES
    first = [places_bytes, Kept(places_bytes)]
    return [[first, *copies(args[2]), *[places_bytes] * 3, 2 * places_bytes + SORT_BYTES]]


def table_gradient(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Where a table has many places, these are sorted, and their sums are made in that order (table_sums.py)."""
    gradient, places, num_rows = args[:3]
    number, width, is_rounded = places.numel(), gradient.shape[-1], gradient.dtype in SIXTEEN_BIT
    pairs = {pair: TableSum(number, num_rows, width, pair, is_rounded) for pair in Pair}
    places_of, sorting, numbers, *others = pairs.values()
    return [[places_of, [sorting], RESULT, numbers, [numbers], *others]]


def norms(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Partial sums of the squares of each tensor, as many as the largest has (ForeachReduceOp.cu)."""
    most = max((-(-tensor.numel() // CHUNK) for tensor in args[0]), default=0)
    return [[len(args[0]) * most * FP32_BYTES, *[RESULT] * len(args[0])]]


def rolled(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Dimensions are rolled one after another (TensorTransformations.h, roll_common)."""
    num_before = max(0, min(2, len(argument(args, named, 2, "dims", ())) - 1))
    return [[*[args[0].numel() * args[0].itemsize] * num_before, RESULT]]


RULES: dict[Any, Rule] = {
    **dict.fromkeys((ATEN.sum, ATEN.mean, ATEN.prod), reduction(sum_bytes)),
    **dict.fromkeys((ATEN.amax, ATEN.amin, ATEN.max, ATEN.min), reduction(lambda dtype: dtype.itemsize)),
    **dict.fromkeys((ATEN.any, ATEN.all), reduction(lambda dtype: 1)),
    **dict.fromkeys((ATEN.argmax, ATEN.argmin), reduction(lambda dtype: PAIR_BYTES)),
    **dict.fromkeys((ATEN.var, ATEN.std, ATEN.var_mean), reduction(lambda dtype: MOMENTS_BYTES)),
    **dict.fromkeys((ATEN.linalg_vector_norm, ATEN.norm), reduction(sum_bytes, place=2)),
    **dict.fromkeys((ATEN.softmax, ATEN.log_softmax), softmax_into),
    NormOps.SOFTMAX_BACKWARD: softmax_backward,
    NormOps.SAFE_SOFTMAX: safe_softmax,
    ATEN.native_dropout: mask_first,
    ATEN.native_batch_norm: batch_norm,
    ATEN.native_batch_norm_backward: batch_norm_backward,
    **dict.fromkeys((ATEN.native_layer_norm, NormOps.RMS), norm_forward),
    ATEN.native_layer_norm_backward: norm_backward(2),
    NormOps.RMS_BACKWARD: norm_backward(1),
    ATEN.convolution: convolution,
    ATEN.convolution_backward: convolution_backward,
    **dict.fromkeys((ATEN.index_put, ATEN.index_put_), added_at),
    ATEN.embedding_dense_backward: table_gradient,
    ManyOps.NORM: norms,
    ATEN.roll: rolled,
    AttentionOps.FLASH: flash_forward,
    AttentionOps.FLASH_BACKWARD: flash_backward,
    AttentionOps.CUDNN_BACKWARD: cudnn_backward,
    AttentionOps.EFFICIENT: efficient_forward,
    AttentionOps.EFFICIENT_BACKWARD: efficient_backward,
    NEAR_ATTENTION: flex_forward,
    NEAR_ATTENTION_BACKWARD: flex_backward,
}
