"""Causal attention, in rows of one sequence, or of several packed sequences that don't see each other.

Shapes: b rows, t tokens of a row, d width of the model, c width of one head, n heads: those of queries, of keys, of
values, or all of them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0  # the ratio of the highest to (almost) the lowest frequency, as in RoFormer


@final
@dataclass(frozen=True)
class Reach:
    """Which tokens a token attends to: of those not later than itself the nearest `window`, itself included, and the
    first `global_tokens` of its sequence."""

    window: int
    global_tokens: int = 0

    def is_whole(self, length: int) -> bool:
        """Whether a token of a sequence of `length` tokens attends to all that aren't later."""
        return max(self.window, self.global_tokens) >= length

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the token at one position attends to that at another one; positions broadcast, the result is bool."""
        distance = query - key
        return (distance >= 0) & ((distance < self.window) | (key < self.global_tokens))


def grouped_attention(
    q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, dropout: float, mask_b1tt: Tensor | None = None
) -> Tensor:
    """Causal attention, like the queries (b, n, t, c). Keys and values may have fewer heads.

    torch's fused kernels accept fewer on a CPU, and in bf16 on cards that have it (compute capability 8.0 on).
    Elsewhere, and with a mask on a card, torch would silently fall back to a kernel that keeps a (t, t) matrix for each
    head (pytorch#154363), so heads of keys and values are repeated instead.

    Args:
        mask_b1tt: see `mask_of`; None: each row is one sequence.
    """
    group, width = int(q_bntc.shape[1]) // int(k_bntc.shape[1]), int(q_bntc.shape[-1])  # a trace has tensors there
    is_flash = q_bntc.dtype is torch.bfloat16 and width <= 256 and mask_b1tt is None
    takes_fewer = is_on_cpu(q_bntc) or is_flash
    if group > 1 and not takes_fewer:
        k_bntc, v_bntc = (x_bntc.repeat_interleave(group, dim=1) for x_bntc in (k_bntc, v_bntc))
    order = {"is_causal": True} if mask_b1tt is None else {"attn_mask": mask_b1tt.to(q_bntc.dtype)}
    options = {"dropout_p": dropout, "enable_gqa": group > 1 and takes_fewer, **order}
    return F.scaled_dot_product_attention(q_bntc, k_bntc, v_bntc, **options)


def mask_of(positions_bt: Tensor, dtype: torch.dtype, reach: Reach | None) -> Tensor:
    """The mask that is added to attention scores, (b, 1, t, t): 0 where the other token is in the same sequence, not
    later and within `reach`, else -inf. A sequence begins where the positions are 0. The mask is made once for all
    layers, in the format of their scores: given booleans, torch would make and keep such a mask in each layer."""
    sequences_bt = (positions_bt == 0).cumsum(1)
    is_seen_btt = (sequences_bt[:, :, None] == sequences_bt[:, None]).tril()
    if reach is not None:
        is_seen_btt &= reach.sees(positions_bt[:, :, None], positions_bt[:, None])
    return as_mask(is_seen_btt, dtype)[:, None]


def as_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that are added to attention scores: 0 where a token is seen, else -inf."""
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, -torch.inf)


def dtype_of_scores(x: Tensor) -> torch.dtype:
    """The number format of attention scores computed from `x`: autocast's, if it is on, else that of `x`."""
    is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether CPU kernels will run on the tensor. A plan for a card patches this function, as its fake tensors are on
    the CPU."""
    return tensor.device.type == "cpu"


@final
class Rotary(nn.Module):
    """Rotates each pair of features of queries and keys by its frequency times the position (Su et al., 2021).

    The product of a query and a key then depends only on their distance. Angles are computed when they are used: a
    table of them would be a buffer that must be moved to the device and kept in fp32.
    """

    def __init__(self, num_value_heads: int) -> None:
        super().__init__()
        self.num_value_heads = num_value_heads  # the last heads, which aren't rotated

    def forward(self, qkv_btnc: Tensor, positions_bt: Tensor | None = None) -> Tensor:
        cos_t1c, sin_t1c = rotary_angles(qkv_btnc, positions_bt)
        qk_btnc, v_btnc = qkv_btnc[:, :, : -self.num_value_heads], qkv_btnc[:, :, -self.num_value_heads :]
        first, second = qk_btnc.chunk(2, dim=-1)
        turned = (first * cos_t1c - second * sin_t1c, first * sin_t1c + second * cos_t1c)
        # Values are copied, too: as a view they would keep the whole projection alive until the backward pass.
        return torch.cat([torch.cat(turned, dim=-1), v_btnc], dim=2)


def rotary_angles(qkv_btnc: Tensor, positions_bt: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (t, 1, c / 2), in the dtype of the input; of rows with positions of
    their own (b, t, 1, c / 2)."""
    num_positions, width = qkv_btnc.shape[1], qkv_btnc.shape[-1]
    exact = torch.promote_types(qkv_btnc.dtype, torch.float32)  # bf16 can't count positions past 256
    options = {"dtype": exact, "device": qkv_btnc.device}
    frequencies_c = ROTARY_BASE ** -torch.arange(0, 1, 2 / width, **options)
    positions = torch.arange(num_positions, **options) if positions_bt is None else positions_bt
    angles_t1c = positions[..., None, None] * frequencies_c
    return angles_t1c.cos().to(qkv_btnc.dtype), angles_t1c.sin().to(qkv_btnc.dtype)


@final
class NoPositions(nn.Module):
    """Encodes no positions: returns its input."""

    def forward(self, x: Tensor, positions_bt: Tensor | None = None) -> Tensor:
        return x
