"""The last layer and the loss for a tile of classes at a time, of all targets of a part.

A pass over all tiles computes the gradient of the weight without a sum: the rows of a tile are one product. With
logits=tiled that is the second pass over the logits, after one over chunks of targets. Where the weight stays in host
memory both passes go over tiles (`StreamedCrossEntropy`): the device holds a tile of it, and a tile of its gradient,
and the weight goes to the device once in each. Both ways take four products.

Shapes: n targets, s rows that are computed at a time, d width of the hidden states, v classes, t
classes of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowvram.core import host
from lowvram.core.host_weights import HostGradient, on_device
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.lookup import NUMEL_AT_A_TIME, Handover
from lowvram.core.rig import IGNORE
from lowvram.core.shards import local
from lowvram.core.soft_targets import SoftTargets
from lowvram.core.stepper import GradientSink

FP16_SCALE = 64.0  # of probabilities: below 6e-5, as of one class among many thousands, fp16 loses precision


@final
@dataclass(frozen=True)
class Way:
    """How a cross-entropy is computed."""

    chunk_tokens: int
    dtype: torch.dtype  # of products
    has_backward: bool
    sums_weights: bool
    handover: Handover | None
    sink: Callable[[], GradientSink | None]  # of the weight's gradient, in the running backward pass
    soft: SoftTargets | None  # what a teacher predicts


def scales_of(dtype: torch.dtype, num_summed: int) -> tuple[float, float]:
    """By what gradients of logits and hidden states are multiplied, before products that sum over so many targets. In
    fp16 gradients are scaled up, against underflow, and hidden states down by about that number, against overflow of
    sums. Both factors are powers of two, so scaling is exact."""
    return (FP16_SCALE, 0.5 ** num_summed.bit_length()) if dtype is torch.float16 else (1.0, 1.0)


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

    hidden_nd: Tensor  # in the dtype of products; any values where nothing counts
    weight_vd: Tensor
    bias_v: Tensor | None
    targets_n1: Tensor
    tile_classes: int

    @classmethod
    def of(
        cls, hidden_nd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, targets_n1: Tensor, size: int, way: Way
    ) -> Self:
        hidden_nd = hidden_nd.where(targets_n1 != IGNORE, 0).to(way.dtype)
        return cls(hidden_nd, weight_vd, bias_v, targets_n1, size)

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


@final
@dataclass(frozen=True)
class WeightGradient:
    """Takes the gradient of a weight tile by tile.

    Args:
        dtype: of the gradient.
        write: takes some rows of it.
        whole_vd: where all of it lies on the device: products in its own dtype are computed there.
    """

    dtype: torch.dtype
    write: Callable[[slice, Tensor], None]
    whole_vd: Tensor | None = None

    @classmethod
    def in_one_tensor(cls, weight_vd: Tensor) -> Self:
        whole_vd = announce(torch.empty_like(weight_vd, requires_grad=False), Kind.GRADIENTS)
        return cls(weight_vd.dtype, whole_vd.__setitem__, whole_vd)

    def add(self, rows: slice, of_logits_nt: Tensor, hidden_nd: Tensor, factor: Tensor) -> None:
        """Take the rows of a tile.

        Args:
            of_logits_nt: the gradients of the tile's logits.
            hidden_nd: in the same dtype.
            factor: by which the product is multiplied before it is rounded.
        """
        if self.whole_vd is not None and hidden_nd.dtype is self.dtype:
            of_weight_td = torch.mm(of_logits_nt.T, hidden_nd, out=self.whole_vd[rows])
            scaled(of_weight_td, factor, may_overwrite=True, dtype=self.dtype)
            return
        of_weight_td = announce(torch.mm(of_logits_nt.T, hidden_nd), Kind.GRADIENTS)
        piece = scaled(of_weight_td, factor, may_overwrite=True, dtype=self.dtype)
        assert piece is not None
        self.write(rows, piece)


def second_pass(
    tiles: Tiles,
    log_sums_n1: Tensor,
    loss_gradient: Tensor,
    of_weight: WeightGradient | None,
    of_hidden_nd: Tensor | None = None,
    of_bias_v: Tensor | None = None,
) -> None:
    """Compute the logits once more, and from them the gradients that are wanted.

    Args:
        log_sums_n1: the logarithms of the sums of the exponentials of all logits of a target.
        of_hidden_nd, of_bias_v: to these their gradients are added, for a loss whose gradient is 1; those of the hidden
            states times `scales_of`'s first factor.
    """
    hidden_nd = tiles.hidden_nd
    logit_scale, hidden_scale = scales_of(hidden_nd.dtype, len(hidden_nd))
    scaled_nd = hidden_nd if hidden_scale == 1.0 else hidden_nd * hidden_scale
    factor = loss_gradient * (1 / logit_scale / hidden_scale)
    for tile in tiles:
        of_bias_t = None if of_bias_v is None else of_bias_v[tile.classes]
        of_logits_nt = tile.gradient_of_logits(log_sums_n1, logit_scale, of_bias_t)
        if of_hidden_nd is not None:
            of_hidden_nd += torch.mm(of_logits_nt, tile.weight_td)
        if of_weight is not None:
            of_weight.add(tile.classes, of_logits_nt, scaled_nd, factor)


@final
class StreamedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of a linear layer's outputs, whose weight stays in host memory. It rounds as
    `ChunkedCrossEntropy`. The forward pass computes only the loss, and the logarithm of each target's sum of
    exponentials."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, targets_n: Tensor, way: Way
    ) -> Tensor:
        targets_n1 = targets_n[:, None]
        size = classes_of_a_tile(len(hidden_nd), len(weight_vd), way.chunk_tokens)
        tiles = Tiles.of(hidden_nd, weight_vd, bias_v, targets_n1, size, way)
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
            ctx.weight_vd, ctx.way, ctx.size = weight_vd, way, size
        return (log_sums_n1 - of_targets_n1).where(targets_n1 != IGNORE, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_nd, bias_v, targets_n1, log_sums_n1 = ctx.saved_tensors
        weight_vd, way, needed = ctx.weight_vd, ctx.way, ctx.needs_input_grad
        tiles = Tiles.of(hidden_nd, weight_vd, bias_v, targets_n1, ctx.size, way)
        of_hidden_nd = torch.zeros_like(tiles.hidden_nd, dtype=tiles.exact) if needed[0] else None
        arriving = HostGradient(weight_vd, hidden_nd.device) if needed[1] else None
        of_bias_v = hidden_nd.new_zeros(len(weight_vd), dtype=tiles.exact) if needed[2] else None
        of_weight = None if arriving is None else WeightGradient(weight_vd.dtype, arriving.write)
        second_pass(tiles, log_sums_n1, loss_gradient, of_weight, of_hidden_nd, of_bias_v)
        logit_scale, _ = scales_of(way.dtype, len(hidden_nd))
        of_hidden = scaled(of_hidden_nd, loss_gradient * (1 / logit_scale), True, hidden_nd.dtype)
        of_bias = scaled(of_bias_v, loss_gradient, True, (weight_vd if bias_v is None else bias_v).dtype)
        whole = None if arriving is None else arriving.arrived()
        return of_hidden, whole if way.handover is None else way.handover.leave(whole), of_bias, None, None


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
