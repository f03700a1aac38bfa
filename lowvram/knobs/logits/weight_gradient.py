"""The gradient of the last layer's weight: summed over chunks of targets, or computed for tiles of classes.

Shapes: n targets, c targets of a chunk, t classes of a tile, d width of the hidden states, v classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lowvram.core.host_weights import HostGradient
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.stepper import GradientSink
from lowvram.knobs.logits.tile import Tiles, scaled


@final
class SumOverChunks:
    """Sums products, in fp32 or wider if there are several. `product_vd` is reused for each chunk: on a CPU, touching
    new memory takes as long as the product that is written to it."""

    def __init__(self, weight_vd: Tensor, sum_dtype: torch.dtype) -> None:
        self.sum_vd = weight_vd.new_zeros(weight_vd.shape, dtype=sum_dtype)
        self.product_vd = None if sum_dtype is weight_vd.dtype else torch.empty_like(weight_vd)

    def add(self, gradient_cv: Tensor, hidden_cd: Tensor) -> None:
        if self.product_vd is None:
            self.sum_vd.addmm_(gradient_cv.T, hidden_cd)
        else:
            self.sum_vd.add_(torch.mm(gradient_cv.T, hidden_cd, out=self.product_vd))


class TiledGradient(ABC):
    """Takes the gradient tile by tile: the rows of a tile are one product, so there is nothing to sum."""

    dtype: torch.dtype  # of the gradient

    def add(self, rows: slice, of_logits_nt: Tensor, hidden_nd: Tensor, factor: Tensor) -> None:
        """Take the rows of a tile.

        Args:
            of_logits_nt: the gradients of the tile's logits.
            hidden_nd: in the same dtype.
            factor: by which the product is multiplied before it is rounded.
        """
        of_weight_td = announce(torch.mm(of_logits_nt.T, hidden_nd), Kind.GRADIENTS)
        piece = scaled(of_weight_td, factor, may_overwrite=True, dtype=self.dtype)
        assert piece is not None
        self.write(rows, piece)

    @abstractmethod
    def write(self, rows: slice, piece: Tensor) -> None:
        """Take some rows of the gradient."""

    @abstractmethod
    def result(self) -> Tensor | None:
        """The whole gradient; None if it has gone elsewhere."""


@final
class OnHost(TiledGradient):
    """The gradient of a weight in host memory goes there."""

    def __init__(self, weight_vd: Tensor, device: torch.device) -> None:
        self.arriving, self.dtype = HostGradient(weight_vd, device), weight_vd.dtype

    def write(self, rows: slice, piece: Tensor) -> None:
        self.arriving.write(rows, piece)

    def result(self) -> Tensor:
        return self.arriving.arrived()


@final
class InOneTensor(TiledGradient):
    """The whole gradient, on the device. Products in its own dtype are computed where it lies."""

    def __init__(self, weight_vd: Tensor) -> None:
        self.whole_vd = announce(torch.empty_like(weight_vd, requires_grad=False), Kind.GRADIENTS)
        self.dtype = weight_vd.dtype

    def add(self, rows: slice, of_logits_nt: Tensor, hidden_nd: Tensor, factor: Tensor) -> None:
        if hidden_nd.dtype is self.dtype:
            of_weight_td = torch.mm(of_logits_nt.T, hidden_nd, out=self.whole_vd[rows])
            scaled(of_weight_td, factor, may_overwrite=True, dtype=self.dtype)
        else:
            super().add(rows, of_logits_nt, hidden_nd, factor)

    def write(self, rows: slice, piece: Tensor) -> None:
        self.whole_vd[rows] = piece

    def result(self) -> Tensor:
        return self.whole_vd


@final
class IntoSink(TiledGradient):
    """Each tile is added to the sum of the step; the whole gradient never exists."""

    def __init__(self, sink: GradientSink, dtype: torch.dtype) -> None:
        self.sink, self.dtype = sink, dtype

    def write(self, rows: slice, piece: Tensor) -> None:
        self.sink.add(rows, piece)

    def result(self) -> None:
        return None


@final
@dataclass(frozen=True)
class SecondPass:
    """Computes the logits once more, of all targets for a tile of classes at a time, and from them the gradient.

    Args:
        log_sums_n1: the logarithms of the sums of the exponentials of all logits of a target.
        logit_scale: by which gradients of logits are multiplied, and `hidden_scale` hidden states.
    """

    tiles: Tiles
    log_sums_n1: Tensor
    logit_scale: float
    hidden_scale: float

    def run(self, of_weight: TiledGradient, loss_gradient: Tensor) -> Tensor | None:
        hidden_nd = self.tiles.hidden_nd
        scaled_nd = hidden_nd if self.hidden_scale == 1.0 else hidden_nd * self.hidden_scale
        factor = loss_gradient * (1 / self.logit_scale / self.hidden_scale)
        for tile in self.tiles:
            of_logits_nt = tile.gradient_of_logits(self.log_sums_n1, self.logit_scale)
            of_weight.add(tile.classes, of_logits_nt, scaled_nd, factor)
        return of_weight.result()
