"""States of 8 bits, in blocks with a scale each. Codes are denser near zero, where most values are ("companding").

FlashOptim (2026), arXiv 2602.23349. A second moment of zero would make its update huge, so no code stands for zero: Li
et al., "Memory Efficient Optimizers with 4-bit States" (2023). Codes are rounded stochastically, so that slow averages
go on moving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from lowvram.core import native
from lowvram.core.fused import fused
from lowvram.core.rounding import bits_at_random
from lowvram.knobs.optimizer.state_formats import ALIGNMENT, SCALES, Kept, Piece, StateFormat

BLOCK_NUMEL = ALIGNMENT  # with one scale
PIECE_NUMEL = 2**16  # that are converted at a time where no kernel does it: a processor's cache holds them
IN_C = Path(__file__).with_suffix(".c")


class Compander(ABC):
    """Places the shares that values have of the largest in their block on a scale whose whole numbers are the codes."""

    name: str  # in C
    dtype: torch.dtype  # of codes
    least: int  # the smallest code
    most: int

    @abstractmethod
    def place(self, shares: Tensor) -> Tensor:
        """Where a share is on the scale of codes."""

    @abstractmethod
    def share(self, places: Tensor) -> Tensor:
        """The inverse."""


@final
class Softsign(Compander):
    """Between -1 and 1, four times as dense at 0 as at both ends."""

    name, dtype, least, most = "softsign", torch.int8, -127, 127

    def place(self, shares: Tensor) -> Tensor:
        return 2 * self.most * shares / (1 + shares.abs())

    def share(self, places: Tensor) -> Tensor:
        return places / (2 * self.most - places.abs())


@final
class Root(Compander):
    """Above 0, at most 1; even in the square roots. Shares below the smallest become it."""

    name, dtype, least, most = "root", torch.uint8, 0, 255

    def place(self, shares: Tensor) -> Tensor:
        return shares.sqrt() * (self.most + 1) - 1

    def share(self, places: Tensor) -> Tensor:
        return ((places + 1) / (self.most + 1)).square()


COMPANDERS = {compander.dtype: compander for compander in (Softsign(), Root())}


def to_codes(codes: Tensor, scales: Tensor, values: Tensor, seed: int) -> None:
    """Args: codes, values: (numel,); scales: (blocks,)."""
    compander = COMPANDERS[codes.dtype]
    padding = len(scales) * BLOCK_NUMEL - len(values)
    values_bk = nn.functional.pad(values, (0, padding)).view(-1, BLOCK_NUMEL)
    scales_b1 = values_bk.abs().amax(1, keepdim=True)
    shares = values_bk / scales_b1.clamp(min=torch.finfo(torch.float32).tiny)
    below = compander.place(shares).floor().clamp(compander.least, compander.most - 1)
    share_below, share_above = compander.share(below), compander.share(below + 1)
    noise = bits_at_random(values_bk.numel(), seed, values.device).view(-1, BLOCK_NUMEL) * 2.0**-24
    places = below + (noise * (share_above - share_below) < shares - share_below)
    codes.copy_(places.nan_to_num().view(-1)[: len(values)])
    scales.copy_(scales_b1.view(-1))


def from_codes(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Args: codes, values: (numel,); scales: (blocks,)."""
    padding = len(scales) * BLOCK_NUMEL - len(values)
    places_bk = nn.functional.pad(codes.float(), (0, padding)).view(-1, BLOCK_NUMEL)
    shares_bk = COMPANDERS[codes.dtype].share(places_bk)
    values.copy_((shares_bk * scales.view(-1, 1)).view(-1)[: len(values)])


def to_codes_on_cpu(codes: Tensor, scales: Tensor, values: Tensor, seed: int) -> None:
    function, size = f"{COMPANDERS[codes.dtype].name}_to_codes", len(values)
    if values.dtype is torch.float32 and native.run(IN_C, function, codes, scales, values, size, seed):
        return
    for start in range(0, len(values), PIECE_NUMEL):
        elements = slice(start, start + PIECE_NUMEL)
        to_codes(codes[elements], scales[blocks_of(elements)], values[elements], seed + start)


def from_codes_on_cpu(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    function, size = f"{COMPANDERS[codes.dtype].name}_from_codes", len(values)
    if values.dtype is torch.float32 and native.run(IN_C, function, values, codes, scales, size):
        return
    for start in range(0, len(values), PIECE_NUMEL):
        elements = slice(start, start + PIECE_NUMEL)
        from_codes(values[elements], codes[elements], scales[blocks_of(elements)])


def blocks_of(elements: slice) -> slice:
    """The blocks that hold these elements, the first of which begins one."""
    return slice(elements.start // BLOCK_NUMEL, -(-elements.stop // BLOCK_NUMEL))


write_companded = fused(
    "write_companded(Tensor(a!) codes, Tensor(b!) scales, Tensor values, int seed) -> ()", to_codes, to_codes_on_cpu
)
read_companded = fused(
    "read_companded(Tensor(a!) values, Tensor codes, Tensor scales) -> ()", from_codes, from_codes_on_cpu
)


@final
class Companded(StateFormat):
    """A code for each element, in the shape of the parameter, and a scale in fp32 for each block of 64.

    A block with a number that isn't finite is read as such.
    """

    def __init__(self, compander: type[Compander]) -> None:
        self.dtype = compander.dtype

    def new(self, name: str, like: Tensor, dtype: torch.dtype, device: torch.device) -> Kept:
        codes = torch.empty(like.shape, dtype=self.dtype, device=device)
        scales = torch.empty(-(-like.numel() // BLOCK_NUMEL), device=device)
        return {name: codes, name + SCALES: scales}

    def read(self, kept: Kept, name: str, piece: Piece, like: Tensor) -> Tensor:
        codes, scales = self.cut(kept, name, piece)
        values = torch.empty_like(like, requires_grad=False)
        flat = values.view(-1) if values.is_contiguous() else torch.empty(codes.shape, device=codes.device).view(-1)
        read_companded(flat, codes.view(-1), scales)
        return values if values.is_contiguous() else values.copy_(flat.view(codes.shape))

    def write(self, kept: Kept, name: str, piece: Piece, exact: Tensor, seed: int) -> None:
        codes, scales = self.cut(kept, name, piece)
        write_companded(codes.view(-1), scales, exact.reshape(-1), seed)

    def cut(self, kept: Kept, name: str, piece: Piece) -> tuple[Tensor, Tensor]:
        """The codes and the scales of a piece."""
        return piece.of(kept[name]), kept[name + SCALES][blocks_of(piece.elements)]
