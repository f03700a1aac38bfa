"""Operators that allocate memory of their own on a card, for test_scratch.py. Each case prepares the tensors on a
device and returns what runs the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowvram.compat.torch_ops import AttentionOps, NormOps, norms
from lowvram.models.flex_attention import NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD

ATEN = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAST = torch.channels_last
Run = Callable[[], Any]


class Case(NamedTuple):
    """What is made of a tensor of this shape and format."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    prepare: Callable[[Tensor], Run]

    def on(self, device: str) -> Run:
        return self.prepare(torch.empty(self.shape, dtype=self.dtype, device=device))


def of(operator: Callable[[Tensor], Any]) -> Callable[[Tensor], Run]:
    return lambda tensor: partial(operator, tensor)


def probabilities(logits: Tensor) -> Run:
    """In fp32, into memory that is there."""
    out = torch.empty_like(logits, dtype=FP32)
    return lambda: torch.log_softmax(logits, -1, dtype=FP32, out=out)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """As it is, in channels_last, or with height and width exchanged."""
    if layout == "last":
        return tensor.to(memory_format=LAST)
    return tensor.transpose(2, 3) if layout == "transposed" else tensor


def convolution(source: Tensor, source_in: str = "", weight_in: str = "") -> Run:
    """From 32 channels to 48."""
    weight = in_layout(source.new_empty(48, 32, 3, 3), weight_in)
    args = (in_layout(source, source_in), weight, source.new_empty(48), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return lambda: ATEN.convolution(*args)


def convolution_backward(
    gradient: Tensor,
    gradient_in: str = "",
    source_in: str = "",
    weight_in: str = "",
    wanted: Sequence[bool] = (True,) * 3,
) -> Run:
    """From 16 channels to 32."""
    gradient = in_layout(gradient, gradient_in)
    source = in_layout(gradient.new_empty(gradient.shape[0], 16, *gradient.shape[2:]), source_in)
    weight = in_layout(gradient.new_empty(32, 16, 3, 3), weight_in)
    about = ([32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, list(wanted))
    return lambda: ATEN.convolution_backward(gradient, source, weight, *about)


def norm(rows: Tensor) -> Run:
    """A layer norm of what isn't in one piece."""
    return lambda: torch.native_layer_norm(rows.t(), rows.shape[:1], None, None, 1e-5)


def rms_norm(rows: Tensor) -> Run:
    """Of what isn't in one piece."""
    return lambda: NormOps.RMS(rows.t(), rows.shape[:1], None, 1e-5)


def norm_backward(
    rows: Tensor, is_source_dense: bool = True, is_gradient_dense: bool = True, is_rms: bool = False
) -> Run:
    """The backward pass of a norm over the last dimension."""
    exchanged = rows.new_empty(rows.shape[::-1]).t()
    source, gradient = rows if is_source_dense else exchanged, rows if is_gradient_dense else exchanged
    mean, weight = rows.new_empty(rows.shape[0], 1, dtype=FP32), rows.new_empty(rows.shape[1])
    if is_rms:
        about = (rows.shape[1:], mean, weight, [True] * 2)
        return lambda: NormOps.RMS_BACKWARD(gradient, source, *about)
    about = (rows.shape[1:], mean, mean, weight, weight, [True] * 3)
    return lambda: ATEN.native_layer_norm_backward(gradient, source, *about)


def batch_norm(images: Tensor, is_backward: bool = False) -> Run:
    images, channels = images.to(memory_format=LAST), images.new_empty(images.shape[1], dtype=FP32)
    if not is_backward:
        return lambda: ATEN.native_batch_norm(images, *[channels] * 4, True, 0.1, 1e-5)
    about = (torch.empty_like(images), images, *[channels] * 5, True, 1e-5, [True] * 3)
    return lambda: ATEN.native_batch_norm_backward(*about)


def softmax_backward(output: Tensor) -> Run:
    gradient = torch.empty_like(output)
    return lambda: NormOps.SOFTMAX_BACKWARD(gradient, output, -1, output.dtype)


def safe_softmax(scores: Tensor) -> Run:
    return lambda: NormOps.SAFE_SOFTMAX(scores, -1)


def gathered_backward(table: Tensor, is_dense: bool = True) -> Run:
    """The backward pass of `table[places]`."""
    places = torch.zeros(100, 500, dtype=torch.int64, device=table.device)
    values = table.new_empty(100, 500, table.shape[1])
    values = values if is_dense else values.transpose(0, 1).contiguous().transpose(0, 1)
    return lambda: table.index_put_((places,), values, accumulate=True)


def embedding_backward(row: Tensor, num_places: int, num_rows: int) -> Run:
    """The backward pass of an embedding. Row (1, width)."""
    places = torch.zeros(num_places // 128, 128, dtype=torch.int64, device=row.device)
    gradient = row.new_empty(*places.shape, row.shape[1])
    return lambda: ATEN.embedding_dense_backward(gradient, places, num_rows, -1, False)


def norms_of(tensor: Tensor, number: int) -> Run:
    tensors = [torch.empty_like(tensor) for _ in range(number)]
    return lambda: norms(tensors, FP32)


def attention_backward(query: Tensor, packet: Any, num_heads: int) -> Run:
    """The backward pass of one of the kernels of attention.

    Args:
        query: (batch, heads, length, width).
        num_heads: of keys and values.
    """
    batch, heads, length, width = query.shape
    query, key, value = (
        query.new_empty(batch, length, number, width).transpose(1, 2) for number in (heads, num_heads, num_heads)
    )
    seed, offset = (torch.zeros(2, dtype=torch.uint64, device=query.device) for _ in range(2))
    rows = query.new_empty(batch, heads, length, dtype=FP32)
    if packet is AttentionOps.FLASH_BACKWARD:
        rest = (query, rows, None, None, length, length, 0.0, True, seed, offset)
        return lambda: packet(query, query, key, value, *rest)
    if packet is AttentionOps.CUDNN_BACKWARD:
        rest = (query, rows[..., None], seed[0], offset[0], None, None, None, length, length, 0.0, True)
        return lambda: packet(query, query, key, value, *rest)
    rest = (query, rows, seed[0], offset[0], 0.0, [True, True, True, False], True)
    return lambda: packet(query, query, key, value, None, *rest)


def near_attention(query: Tensor, num_heads: int, is_backward: bool = False) -> Run:
    """FlexAttention over a window of 100 tokens and 5 global ones; arguments as those of `attention_backward`. Its
    kernels are compiled here."""
    batch, heads, length, width = query.shape
    query, key, value = (
        query.new_empty(batch, length, number, width).transpose(1, 2) for number in (heads, num_heads, num_heads)
    )
    args, reach = (query, key, value), (100, 5)
    if is_backward:
        args = (query, *args, query, query.new_empty(batch, heads, length, dtype=FP32))
    packet = NEAR_ATTENTION_BACKWARD if is_backward else NEAR_ATTENTION
    packet(*args, *reach)
    return lambda: packet(*args, *reach)


def attention(shape: tuple[int, ...], dtype: torch.dtype, packet: Any, num_heads: int) -> Case:
    return Case(shape, dtype, partial(attention_backward, packet=packet, num_heads=num_heads))


IMAGES = (8, 32, 56, 56)
LAYOUTS = ("", "last", "transposed")
CONVOLUTIONS = {
    f"convolution of {source or 'dense'} input, {weight or 'dense'} weight": Case(
        IMAGES, FP16, partial(convolution, source_in=source, weight_in=weight)
    )
    for source in LAYOUTS
    for weight in LAYOUTS[:2]
}
CONVOLUTIONS_BACKWARD = {
    f"convolution of {source or 'dense'} input, {weight or 'dense'} weight, {gradient or 'dense'} gradient, "
    f"backward{'' if all(wanted) else ' without the input' if wanted[1] else ' of the input alone'}": Case(
        IMAGES,
        FP16,
        partial(convolution_backward, gradient_in=gradient, source_in=source, weight_in=weight, wanted=wanted),
    )
    for gradient in LAYOUTS
    for source in LAYOUTS[:2]
    for weight in LAYOUTS[:2]
    for wanted in ((True, True, True), (False, True, True), (True, False, False))
}
TABLES = {
    f"embedding of {num_places} places in {num_rows} rows, {width} wide, in {dtype}": Case(
        (1, width), dtype, partial(embedding_backward, num_places=num_places, num_rows=num_rows)
    )
    for num_places in (3072, 8192)
    for num_rows in (2, 1024, 50257)
    for width in (100, 768)
    for dtype in (FP32, BF16)
}
EFFICIENT = {
    f"efficient, {length} queries, {width} wide, in {dtype}": attention(
        (4, 8, length, width), dtype, AttentionOps.EFFICIENT_BACKWARD, 8
    )
    for length in (200, 1000)
    for width in (64, 80, 112, 160, 256)
    for dtype in (FP16, FP32)
}
FLEX = {
    f"flex{' backward' * is_backward}, {length} queries, {num_heads} of 4 heads, {width} wide, in {dtype}": Case(
        (4, 4, length, width), dtype, partial(near_attention, num_heads=num_heads, is_backward=is_backward)
    )
    for length, num_heads, width, dtype in ((1024, 4, 64, BF16), (1000, 2, 48, FP32))
    for is_backward in (False, True)
}
CASES: dict[str, Case] = {
    "rows": Case((8192, 768), FP32, of(lambda x: x.sum(0))),
    "rows in bf16": Case((4096, 1000), BF16, of(lambda x: x.sum(0))),
    "odd columns": Case((4096, 771), FP32, of(lambda x: x.sum(0))),
    "images": Case((32, 64, 28, 28), FP32, of(lambda x: x.sum((0, 2, 3)))),
    "all": Case((4096, 4096), FP32, of(lambda x: x.sum())),
    "rows' largest": Case((65536, 64), BF16, of(lambda x: x.amax(0))),
    "length": Case((3000, 3000), FP32, of(torch.linalg.vector_norm)),
    "mean of columns": Case((64, 65536), FP32, of(lambda x: x.mean(1))),
    "images rolled": Case((8, 56, 56, 96), FP32, of(lambda x: x.roll((3, 3), (1, 2)))),
    "probabilities of bf16": Case((128, 5000), BF16, probabilities),
    "probabilities of fp16": Case((128, 5000), FP16, probabilities),
    "dropout": Case((512, 512), BF16, of(lambda x: ATEN.native_dropout(x, 0.1, True))),
    "softmax backward": Case((8, 8, 128, 128), BF16, softmax_backward),
    "norm of what isn't in one piece": Case((512, 768), FP32, norm),
    "norm of many rows backward": Case((70_000, 96), FP32, norm_backward),
    "norm of many rows in bf16 backward": Case((70_000, 96), BF16, norm_backward),
    "norm of few rows backward": Case((60_000, 96), FP32, norm_backward),
    "norm backward, exchanged gradient": Case((4096, 96), FP32, partial(norm_backward, is_gradient_dense=False)),
    "norm backward, exchanged input": Case((4096, 96), FP32, partial(norm_backward, is_source_dense=False)),
    "softmax of scores": Case((16, 512, 1024), FP32, safe_softmax),
    "softmax of scores in bf16": Case((16, 512, 1024), BF16, safe_softmax),
    "softmax of long rows of scores": Case((64, 40_000), FP32, safe_softmax),
    "RMS norm of what isn't in one piece": Case((512, 768), BF16, rms_norm),
    "RMS norm of many rows backward": Case((70_000, 96), FP32, partial(norm_backward, is_rms=True)),
    "RMS norm of many rows in bf16 backward": Case((70_000, 96), BF16, partial(norm_backward, is_rms=True)),
    "RMS norm of few wide rows backward": Case((4096, 1024), BF16, partial(norm_backward, is_rms=True)),
    "RMS norm backward, exchanged gradient": Case(
        (4096, 96), FP32, partial(norm_backward, is_gradient_dense=False, is_rms=True)
    ),
    "RMS norm backward, exchanged input": Case(
        (4096, 96), FP32, partial(norm_backward, is_source_dense=False, is_rms=True)
    ),
    "batch norm in channels_last": Case((128, 1024, 14, 14), BF16, batch_norm),
    "batch norm in channels_last backward": Case((128, 1024, 14, 14), BF16, partial(batch_norm, is_backward=True)),
    "batch norm of few images in channels_last": Case((4, 512, 7, 7), BF16, batch_norm),
    "norms of a few tensors": Case((8000, 1000), BF16, partial(norms_of, number=50)),
    "table": Case((300, 40), FP32, gathered_backward),
    "table, exchanged gradient": Case((300, 40), FP32, partial(gathered_backward, is_dense=False)),
    "flash": attention((2, 8, 200, 64), BF16, AttentionOps.FLASH_BACKWARD, 8),
    "flash, grouped": attention((2, 8, 256, 96), FP16, AttentionOps.FLASH_BACKWARD, 2),
    "cudnn": attention((2, 8, 200, 64), BF16, AttentionOps.CUDNN_BACKWARD, 8),
    "efficient, fp32": attention((8, 32, 1024, 96), FP32, AttentionOps.EFFICIENT_BACKWARD, 32),
    **EFFICIENT,
    **FLEX,
    **CONVOLUTIONS,
    **CONVOLUTIONS_BACKWARD,
    **TABLES,
}
