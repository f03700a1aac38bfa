"""Temporary memory of the kernels of attention on a card, after torch 2.13's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowvram.core.device import Card
from lowvram.planning.memory.segments import rounded_up
from lowvram.planning.trace.allocations import RESULT, Allocations, Kept, Result, argument
from lowvram.planning.trace.attention import AMPERE, SIXTEEN_BIT, SMALL_SHARED_MEMORY
from lowvram.planning.trace.reductions import FP32_BYTES

LOCK_BYTES, MOST_AT_WORK = 16, 200  # of the memory-efficient kernel; thread blocks over all heads


def flash_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """With few queries, the keys are split into parts, whose results are kept in fp32 and then added (flash_api.cpp,
    set_params_splitkv)."""
    query, key, dropout = args[0], args[1], argument(args, named, 3, "dropout_p", 0.0)
    batch, heads, length, width = query.shape
    num_parts = 1 if dropout else num_parts_of(card, batch * heads * -(-length // 64), key.shape[-2], width)
    if num_parts == 1:
        return ()
    rows = num_parts * batch * heads * length * FP32_BYTES
    return [[rows, rows * rounded_up(width, 32)]]


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


def flash_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Row sums and the query's gradient in fp32; with grouped-query attention, also gradients of keys and values for
    each query head (flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * rounded_up(length, 128) * FP32_BYTES
    expanded = batch * key.shape[2] * heads * width * key.dtype.itemsize
    return [[rows, rows * rounded_up(width, 32), *([] if key.shape[1] == heads else [expanded, expanded])]]


def cudnn_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Row sums and the query's gradient in fp32, in one allocation (cudnn-frontend's SDPA_backward)."""
    batch, heads, length, width = args[1].shape
    return [[batch * heads * length * (width + 1) * FP32_BYTES]]


def efficient_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """16-bit outputs of wide heads are accumulated in fp32."""
    query, width = args[0], args[2].shape[-1]
    is_summed = query.dtype in SIXTEEN_BIT and width > 128
    return [[query[..., 0].numel() * width * FP32_BYTES]] if is_summed else ()


def efficient_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Row sums, and an fp32 accumulator of the query's gradient in blocks, each with a lock; for 16-bit wide heads also
    one of each block of keys and values that is at work (attention_backward.cu; workspace_elements_gq and its
    neighbours in kernel_backward.h). For fp32 the row sums are made from a product of output and gradient."""
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    is_16_bit = query.dtype in SIXTEEN_BIT
    num_queries, num_keys = efficient_block(card, width, is_16_bit)
    num_blocks = -(-length // num_queries) * -(-width // num_keys)
    head_bytes = num_blocks * (num_queries * num_keys * FP32_BYTES + LOCK_BYTES)
    if is_16_bit and (width > 128 or (width > 96 and card.capability in SMALL_SHARED_MEMORY)):
        at_work = min(-(-key.shape[2] // num_keys), max(1, MOST_AT_WORK // (batch * heads)))
        widths = rounded_up(width, num_queries) + rounded_up(value.shape[-1], num_queries)
        head_bytes += at_work * num_keys * widths * FP32_BYTES
    rows = batch * heads * length * FP32_BYTES
    first = [rows] if is_16_bit else [[rows * value.shape[-1], rows, Kept(rows)]]
    return [[*first, batch * heads * head_bytes]]


def flex_forward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """The largest score of each query, which nothing reads (torch/_inductor/kernel/flex/flex_attention.py)."""
    return [[Result.LAST, args[0][..., 0].numel() * FP32_BYTES, RESULT]]


def flex_backward(card: Card, args: Sequence[Any], named: Mapping[str, Any]) -> Allocations:
    """Row sums of the product of output and gradient (the same file)."""
    return [[args[0][..., 0].numel() * FP32_BYTES, *[RESULT] * 3]]


def efficient_block(card: Card, width: int, is_16_bit: bool) -> tuple[int, int]:
    """The number of queries and of keys in a thread block of the memory-efficient kernel's backward pass, which depend
    on the shared memory of a multiprocessor."""
    is_large = card.capability >= AMPERE and card.capability not in SMALL_SHARED_MEMORY
    if width <= 64:
        return 64, 64
    if width > 128:
        return (128 if is_16_bit or is_large else 64), 64
    if is_large:
        return (128 if is_16_bit else 64), 128
    return 64, (128 if is_16_bit and (width <= 96 or card.capability < AMPERE) else 64)
