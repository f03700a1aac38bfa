"""Tiles of the last layer's classes, for all targets of a part: their logits, and the gradients of these.

Shapes: n targets, s rows that are computed at a time, d width of the hidden states, v classes, t
classes of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from lowvram.core import host
from lowvram.core.host_weights import on_device
from lowvram.core.lookup import NUMEL_AT_A_TIME
from lowvram.core.rig import IGNORE
from lowvram.core.shards import local

FP16_SCALE = 64.0  # of probabilities: below 6e-5, as of one class among many thousands, fp16 loses precision


@final
@dataclass(frozen=True)
class Tile:
    """Classes from `first` on."""

    first: int
    weight_td: Tensor
    logits_nt: Tensor
    is_ignored_n1: Tensor
    is_here_n1: Tensor  # whether the target is one of the tile's classes
    places_n1: Tensor  # of the target in the tile; any if it isn't there

    @classmethod
    def of(
        cls, hidden_nd: Tensor, weight_td: Tensor, bias_t: Tensor | None, targets_n1: Tensor, first: int, buffer: Tensor
    ) -> Self:
        """Compute the logits into the buffer."""
        logits_nt = buffer[: len(hidden_nd) * len(weight_td)].view(len(hidden_nd), len(weight_td))
        if bias_t is None:
            torch.mm(hidden_nd, weight_td.T, out=logits_nt)
        else:
            torch.addmm(bias_t, hidden_nd, weight_td.T, out=logits_nt)
        places_n1 = targets_n1 - first
        is_here_n1 = (places_n1 >= 0) & (places_n1 < len(weight_td))
        places_n1 = places_n1.clamp(0, len(weight_td) - 1)
        return cls(first, weight_td, logits_nt, targets_n1 == IGNORE, is_here_n1, places_n1)

    @property
    def classes(self) -> slice:
        return slice(self.first, self.first + len(self.weight_td))

    def rows_at_a_time(self) -> Iterator[slice]:
        """Runs of rows of which copies in fp32 may exist."""
        size = max(1, NUMEL_AT_A_TIME // len(self.weight_td))
        for first in range(0, len(self.logits_nt), size):
            yield slice(first, first + size)

    def gradient_of_logits(self, log_sums_n1: Tensor, scale: float, of_bias_t: Tensor | None = None) -> Tensor:
        """Overwrite the logits with their gradients (n, t): p - 1 at the target, else p, from probabilities in fp32 or
        wider; 0 where nothing counts.

        Args:
            log_sums_n1: the logarithms of the sums of the exponentials of all logits of a target.
            scale: by which gradients are multiplied.
            of_bias_t: to which their sums over targets, without the scale, are added.
        """
        for rows in self.rows_at_a_time():
            logits_st, log_sums_s1 = self.logits_nt[rows], log_sums_n1[rows]
            exact_st = logits_st.to(log_sums_s1.dtype).sub_(log_sums_s1).exp_()
            exact_st.scatter_add_(1, self.places_n1[rows], -self.is_here_n1[rows].to(exact_st.dtype))
            exact_st.masked_fill_(self.is_ignored_n1[rows], 0)
            if of_bias_t is not None:
                of_bias_t += exact_st.sum(0)
            logits_st.copy_(exact_st.mul_(scale) if scale != 1.0 else exact_st)
        return self.logits_nt


@final
@dataclass(frozen=True)
class Tiles:
    """What the logits of all tiles are computed from. Of a weight in host memory a tile at a time goes to the
    device."""

    hidden_nd: Tensor  # in the dtype of products
    weight_vd: Tensor
    bias_v: Tensor | None
    targets_n1: Tensor
    tile_classes: int

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.hidden_nd.dtype, torch.float32)

    def __iter__(self) -> Iterator[Tile]:
        """All tiles, one after the other, with their logits."""
        hidden_nd, dtype = self.hidden_nd, self.hidden_nd.dtype
        size = min(self.tile_classes, len(self.weight_vd))
        buffer = hidden_nd.new_empty(len(hidden_nd) * size)
        weight_vd = local(self.weight_vd.detach())
        for first in range(0, len(weight_vd), size):
            weight_td = weight_vd[first : first + size]
            if host.holds(self.weight_vd):
                weight_td = on_device(weight_td, hidden_nd.device)
            bias_t = None if self.bias_v is None else self.bias_v[first : first + size].to(dtype)
            yield Tile.of(hidden_nd, weight_td.to(dtype), bias_t, self.targets_n1, first, buffer)


def classes_of_a_tile(num_targets: int, num_classes: int, chunk_tokens: int) -> int:
    """As many as need the memory of the logits of `chunk_tokens` targets."""
    return max(1, min(chunk_tokens, num_targets) * num_classes // max(1, num_targets))


def scaled(gradient: Tensor | None, factor: Tensor, may_overwrite: bool, dtype: torch.dtype) -> Tensor | None:
    """`gradient` · `factor`, computed in the factor's dtype and rounded to `dtype` once; a few rows at a time if the
    gradient has another dtype."""
    if gradient is None:
        return None
    if gradient.dtype is factor.dtype:
        return (gradient.mul_(factor) if may_overwrite else gradient * factor).to(dtype)
    out = gradient if may_overwrite and gradient.dtype is dtype else torch.empty_like(gradient, dtype=dtype)
    num_rows = max(1, NUMEL_AT_A_TIME // max(1, gradient[:1].numel()))
    for rows, out_rows in zip(gradient.split(num_rows), out.split(num_rows), strict=True):
        out_rows.copy_(rows.to(factor.dtype).mul_(factor))
    return out
