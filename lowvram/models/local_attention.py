"""Causal attention in which a token sees those shortly before it, and the first ones of all.

Beltagy et al., "Longformer: The Long-Document Transformer" (2020); Zaheer et al., "Big Bird: Transformers for Longer
Sequences" (2020). Theirs looks in both directions; here no token sees a later one.

Shapes: those of attention.py; also m blocks, s tokens of a block, g tokens that all others see.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowvram.core.recomputed import keeps_everything, recomputed_later
from lowvram.models.attention import Reach, as_mask, grouped_attention
from lowvram.models.flex_attention import can_flex, flex_attention

SMALLEST_BLOCK = 32  # with smaller ones the kernels take longer than with the pairs that larger ones add
ALIGNMENT = 8  # tokens: torch copies a mask for the memory-efficient kernel unless its rows are multiples of them


class LocalKernel(Enum):
    """What computes local attention. The names are what a user types."""

    blocks = "blocks of tokens, each by torch's fused attention"
    flex = "torch's FlexAttention on a card, blocks elsewhere"


@final
class LocalAttention(nn.Module):
    """Attention within a reach: work and memory grow with t, not with t * t.

    The blocks need a copy of the keys and values that holds most of them twice. It isn't kept: the backward pass
    computes the attention again, from queries, keys and values.
    """

    def __init__(self, reach: Reach, kernel: LocalKernel = LocalKernel.blocks) -> None:
        super().__init__()
        self.reach, self.is_flex = reach, kernel is LocalKernel.flex

    def forward(
        self, q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, dropout: float, mask_b1tt: Tensor | None = None
    ) -> Tensor:
        """As `grouped_attention`. A mask already holds the reach."""
        if mask_b1tt is not None or self.reach.is_whole(q_bntc.shape[2]):
            return grouped_attention(q_bntc, k_bntc, v_bntc, dropout, mask_b1tt)
        if self.is_flex and can_flex(q_bntc):  # there is no dropout then: TransformerConfig
            return flex_attention(q_bntc, k_bntc, v_bntc, self.reach)
        args = (q_bntc, k_bntc, v_bntc, dropout, self.reach)
        if keeps_everything() or not (torch.is_grad_enabled() and q_bntc.requires_grad):
            return in_blocks(*args)
        call = in_blocks if torch.compiler.is_compiling() else computed_again
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=dropout > 0)  # pyright: ignore[reportReturnType]


def computed_again(*args: Any) -> Tensor:
    """`in_blocks`, marked so that ckpt=selective doesn't keep what this recomputes anyway."""
    with recomputed_later():
        return in_blocks(*args)


def in_blocks(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, dropout: float, reach: Reach) -> Tensor:
    """Attention within `reach`, (b, n, t, c).

    The first g + s tokens attend to each other. The others form blocks of s tokens: each attends to itself, to the s
    tokens before it, and to the first g, which lie further back. All blocks share one mask.
    """
    length, size, num_global = q_bntc.shape[2], block_size(reach.window), reach.global_tokens
    num_first = min(length, num_global + size)
    q, k, v = (x_bntc[:, :, :num_first] for x_bntc in (q_bntc, k_bntc, v_bntc))
    places = torch.arange(num_first, device=q.device)
    mask = as_mask(reach.sees(places[:, None], places), q.dtype)
    y_btnc = grouped_attention(q, k, v, dropout, mask[None, None]).transpose(1, 2)
    if num_first < length:
        q_bmnsc = as_blocks(q_bntc[:, :, num_first:], size)
        k, v = (keys_of_blocks(x_bntc, num_first, size, num_global).flatten(0, 1) for x_bntc in (k_bntc, v_bntc))
        mask = mask_of_blocks(reach, size, q_bmnsc)
        z = grouped_attention(q_bmnsc.flatten(0, 1), k, v, dropout, mask[None, None])
        z_btnc = z.transpose(1, 2).unflatten(0, q_bmnsc.shape[:2]).flatten(1, 2)
        y_btnc = torch.cat([y_btnc, z_btnc[:, : length - num_first]], 1)
    return y_btnc.transpose(1, 2)


def block_size(window: int) -> int:
    """Tokens of a block: at least the window, so that no token sees further back than the block before its own."""
    return -(-max(window, SMALLEST_BLOCK) // ALIGNMENT) * ALIGNMENT


def as_blocks(x_bntc: Tensor, size: int) -> Tensor:
    """Blocks of tokens, (b, m, n, s, c); the last one is padded with zeros, which no token sees: they come last."""
    missing = -x_bntc.shape[2] % size
    return F.pad(x_bntc, (0, 0, 0, missing)).unflatten(2, (-1, size)).transpose(1, 2)


def keys_of_blocks(x_bntc: Tensor, num_first: int, size: int, num_global: int) -> Tensor:
    """What the blocks after the first tokens attend to, (b, m, n, g + 2s, c)."""
    x_bmnsc = as_blocks(x_bntc[:, :, num_first - size :], size)
    before, own = x_bmnsc[:, :-1], x_bmnsc[:, 1:]
    seen_by_all = x_bntc[:, None, :, :num_global].expand(-1, own.shape[1], -1, -1, -1)
    return torch.cat([seen_by_all, before, own], 3)


def mask_of_blocks(reach: Reach, size: int, like: Tensor) -> Tensor:
    """The mask of each block, (s, g + 2s), in the number format of `like`."""
    places = torch.arange(2 * size, device=like.device)
    is_near = Reach(reach.window).sees(places[size:, None], places)
    return F.pad(as_mask(is_near, like.dtype), (reach.global_tokens, 0))
