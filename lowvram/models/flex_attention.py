"""Attention within a reach by torch's FlexAttention (Dong et al., 2024): kernels for CUDA that skip blocks of pairs of
which no token sees the other. Plans and ledgers see one operator forward and one backward.

Shapes: those of attention.py; also m blocks of queries, or of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowvram.compat.torch_autograd import below_autograd
from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_flex import compiled, flex_backward, flex_forward
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.fused import COSTLY, LIBRARY
from lowvram.models import attention
from lowvram.models.attention import Reach

BLOCK = 128  # queries, and keys, of a block
LEAST_WIDTH = 16  # of a head
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
TABLES = [
    f"{whole}{side}_{what}" for side in ("kv", "q") for whole in ("", "full_") for what in ("num_blocks", "indices")
]


def can_flex(q_bntc: Tensor) -> bool:
    """Whether the operator runs there: on a card, and in plans for one, where tensors have no values."""
    is_there = q_bntc.is_cuda or (is_fake(q_bntc) and not attention.is_on_cpu(q_bntc))
    return is_there and attention.dtype_of_scores(q_bntc) in DTYPES


def flex_attention(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, reach: Reach) -> Tensor:
    """Causal attention within `reach`, like the queries (b, n, t, c). Keys and values may have fewer heads."""
    dtype = attention.dtype_of_scores(q_bntc)
    inputs = (x_bntc.to(dtype) for x_bntc in (q_bntc, k_bntc, v_bntc))
    return NEAR_ATTENTION(*inputs, reach.window, reach.global_tokens)[0]


# Which pairs are computed


@cache
def tables(reach: Reach, length: int, device: torch.device) -> list[Tensor]:
    """`TABLES` of a BlockMask: which blocks of keys each block of queries sees in part, and which ones whole; then the
    same the other way round. They are made from the places of blocks, without a tensor of all pairs."""
    first_m = torch.arange(0, length, BLOCK, device=device)
    q_first, k_first = first_m[:, None], first_m
    q_last, k_last = q_first + BLOCK - 1, k_first + BLOCK - 1
    is_seen_mm = (k_first <= q_first) & ((q_first - k_last < reach.window) | (k_first < reach.global_tokens))
    # The key that is furthest from the last query, without those that all see.
    is_near_mm = q_last - k_first.clamp(min=reach.global_tokens) < reach.window
    is_whole_mm = (k_last <= q_first) & (is_near_mm | (k_last < reach.global_tokens)) & (q_last < length)
    is_partial_mm = is_seen_mm & ~is_whole_mm
    ways = (is_partial_mm, is_whole_mm, is_partial_mm.T, is_whole_mm.T)
    return [table for is_seen_mm in ways for table in table_of(is_seen_mm)]


def table_of(is_seen_mm: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the number of columns that are seen, (1, 1, m), and these columns before the others, (1, 1, m, m)."""
    order_mm = is_seen_mm.byte().argsort(dim=1, descending=True, stable=True)
    return is_seen_mm.sum(1, dtype=torch.int32)[None, None], order_mm.int()[None, None].contiguous()


def mask_of(reach: Reach, length: int, of_tables: list[Tensor]) -> BlockMask:
    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reach.sees(query, key)

    named: dict[str, Any] = dict(zip(TABLES, of_tables, strict=True))
    return BlockMask((length, length), **named, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)


def num_pairs(reach: Reach, length: int) -> int:
    """How many pairs one head of one sequence computes: those of all blocks that are seen, also in part."""
    near, of_all = 1 + (reach.window + BLOCK - 2) // BLOCK, -(-reach.global_tokens // BLOCK)
    return BLOCK**2 * sum(min(before + 1, near + of_all) for before in range(-(-length // BLOCK)))


# The operators


def forward(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, window: int, global_tokens: int) -> tuple[Tensor, Tensor]:
    return run(flex_forward, Reach(window, global_tokens), q_bntc, k_bntc, v_bntc)


def backward(grad_bntc: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, window, global_tokens = args
    return run(flex_backward, Reach(window, global_tokens), grad_bntc, *inputs)


KERNELS: dict[Any, Callable[..., Any]] = {}  # by all that is compiled into them


def run(function: Callable[..., Any], reach: Reach, *inputs: Tensor) -> Any:
    """Call `function` of the inputs and a mask as kernels, which are compiled for each new shape."""
    length, device = inputs[0].shape[2], inputs[0].device
    # Inside a dispatch mode nothing may be compiled.
    with torch.no_grad(), below_autograd(), without_dispatch_modes():
        given = [*inputs, *tables(reach, length, device)]
        metadata = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs]
        key = (function, reach, device, torch.backends.cuda.matmul.fp32_precision, *metadata)
        if key not in KERNELS:
            with torch.autocast(device.type, enabled=False):  # the inputs are cast already
                KERNELS[key] = compiled(with_tables(function, reach, length), given)
        return KERNELS[key](*given)


def with_tables(function: Callable[..., Any], reach: Reach, length: int) -> Callable[..., Any]:
    """The function with the tables of its mask as further arguments."""

    def call(*given: Tensor) -> Any:
        first = len(given) - len(TABLES)
        return function(*given[:first], mask_of(reach, length, list(given[first:])))

    return call


def new_results(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, *reach: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_bntc), q_bntc.new_empty(q_bntc.shape[:3], dtype=torch.float32)


def new_gradients(grad_bntc: Tensor, q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q_bntc), torch.empty_like(k_bntc), torch.empty_like(v_bntc)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.global_tokens = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, grad_bntc: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *NEAR_ATTENTION_BACKWARD(grad_bntc, *ctx.saved_tensors, ctx.window, ctx.global_tokens), None, None


INPUTS, REACH = "Tensor q_bntc, Tensor k_bntc, Tensor v_bntc", "int window, int global_tokens"
LIBRARY.define(f"near_attention({INPUTS}, {REACH}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"near_attention_backward(Tensor grad_bntc, {INPUTS}, Tensor y_bntc, Tensor sums_bnt, {REACH}) -> "
    "(Tensor, Tensor, Tensor)"
)
NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD = torch.ops.lowvram.near_attention, torch.ops.lowvram.near_attention_backward
LIBRARY.impl("near_attention", forward, "CUDA")
LIBRARY.impl("near_attention", new_results, "Meta")
LIBRARY.impl("near_attention_backward", backward, "CUDA")
LIBRARY.impl("near_attention_backward", new_gradients, "Meta")
torch.library.register_autograd("lowvram::near_attention", gradients, setup_context=save, lib=LIBRARY)
COSTLY.add(NEAR_ATTENTION.default)
