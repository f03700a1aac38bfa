"""Logits and loss for a tile of classes at a time, with a weight that stays in host memory: the device holds a tile of
it, and a tile of its gradient.

The forward pass computes only the loss, and the logarithm of each target's sum of exponentials. The backward pass
computes each tile of logits again and then all gradients. The weight goes to the device once in each. Products are as
many as with logits=tiled: four.

Shapes: n targets, d width of the hidden states, v classes, t classes of a tile.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowvram.core.lookup import Handover
from lowvram.core.rig import IGNORE
from lowvram.knobs.logits.tile import FP16_SCALE, Tile, Tiles, scaled
from lowvram.knobs.logits.weight_gradient import OnHost


@final
class StreamedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of a linear layer's outputs. It rounds as `ChunkedCrossEntropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        targets_n: Tensor,
        tile_classes: int,
        dtype: torch.dtype,
        handover: Handover | None,
    ) -> Tensor:
        targets_n1 = targets_n[:, None]
        counts_n1 = targets_n1 != IGNORE
        tiles = Tiles(hidden_nd.where(counts_n1, 0).to(dtype), weight_vd, bias_v, targets_n1, tile_classes)
        log_sums_n1 = hidden_nd.new_full((len(hidden_nd), 1), -torch.inf, dtype=tiles.exact)
        of_targets_n1 = torch.zeros_like(log_sums_n1)
        for tile in tiles:
            for rows in tile.rows_at_a_time():
                exact_st = tile.logits_nt[rows].to(tiles.exact)
                of_targets_n1[rows] += exact_st.gather(1, tile.places_n1[rows]).where(tile.is_here_n1[rows], 0)
                sums_s1 = exact_st.logsumexp(1, keepdim=True)
                torch.logaddexp(log_sums_n1[rows], sums_s1, out=log_sums_n1[rows])
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden_nd, bias_v, targets_n1, log_sums_n1)
            ctx.weight_vd, ctx.fixed, ctx.handover = weight_vd, (tile_classes, dtype), handover
        return (log_sums_n1 - of_targets_n1).where(counts_n1, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_nd, bias_v, targets_n1, log_sums_n1 = ctx.saved_tensors
        tile_classes, dtype = ctx.fixed
        counts_n1 = targets_n1 != IGNORE
        tiles = Tiles(hidden_nd.where(counts_n1, 0).to(dtype), ctx.weight_vd, bias_v, targets_n1, tile_classes)
        gradients = Gradients(tiles, hidden_nd.dtype, loss_gradient, ctx.needs_input_grad)
        for tile in tiles:
            gradients.add(tile, log_sums_n1)
        of_hidden, of_weight, of_bias = gradients.result()
        if ctx.handover is not None:
            of_weight = ctx.handover.leave(of_weight)
        return of_hidden, of_weight, of_bias, None, None, None, None


@final
class Gradients:
    """The gradients of hidden states and bias, summed over tiles, and that of the weight, which goes to the host.

    In fp16 gradients of logits are scaled up, against underflow, and hidden states down by about their number, against
    overflow of sums. Both factors are powers of two, so scaling is exact.
    """

    def __init__(
        self, tiles: Tiles, hidden_dtype: torch.dtype, loss_gradient: Tensor, needed: tuple[bool, ...]
    ) -> None:
        hidden_nd, exact = tiles.hidden_nd, tiles.exact
        self.loss_gradient, self.hidden_dtype = loss_gradient, hidden_dtype
        is_narrow = hidden_nd.dtype is torch.float16
        self.logit_scale = FP16_SCALE if is_narrow else 1.0
        self.hidden_scale = 0.5 ** len(hidden_nd).bit_length() if is_narrow else 1.0
        self.of_hidden_nd = torch.zeros_like(hidden_nd, dtype=exact) if needed[0] else None
        self.of_weight = OnHost(tiles.weight_vd, hidden_nd.device) if needed[1] else None
        self.of_bias_v = hidden_nd.new_zeros(len(tiles.weight_vd), dtype=exact) if needed[2] else None
        self.scaled_nd = hidden_nd * self.hidden_scale if is_narrow else hidden_nd
        self.weight_dtype = tiles.weight_vd.dtype
        self.bias_dtype = None if tiles.bias_v is None else tiles.bias_v.dtype

    def add(self, tile: Tile, log_sums_n1: Tensor) -> None:
        """Add those of a tile. Its logits are overwritten with their gradients."""
        of_bias_t = None if self.of_bias_v is None else self.of_bias_v[tile.classes]
        of_logits_nt = tile.gradient_of_logits(log_sums_n1, self.logit_scale, of_bias_t)
        if self.of_hidden_nd is not None:
            self.of_hidden_nd += torch.mm(of_logits_nt, tile.weight_td)
        if self.of_weight is not None:
            factor = self.loss_gradient * (1 / self.logit_scale / self.hidden_scale)
            self.of_weight.add(tile.classes, of_logits_nt, self.scaled_nd, factor)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias."""
        of_hidden = scaled(self.of_hidden_nd, self.loss_gradient * (1 / self.logit_scale), True, self.hidden_dtype)
        of_bias = scaled(self.of_bias_v, self.loss_gradient, True, self.bias_dtype or self.weight_dtype)
        return of_hidden, None if self.of_weight is None else self.of_weight.result(), of_bias
