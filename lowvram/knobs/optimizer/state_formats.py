"""How an optimizer's states are kept between steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lowvram.core.rounding import stochastically
from lowvram.core.shards import local, on_mesh

ALIGNMENT = 64  # elements; a piece of a parameter begins at a multiple of them
SCALES = ".scales"  # ends the names of tensors that belong to a state of another name

Kept = dict[str, Any]  # the state of one parameter, as its optimizer holds it


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter, and of every tensor of its shape.

    Args:
        rows: of this rank's shard; None: the whole parameter, over all ranks.
        elements: the same, in a count of the elements of all rows.
    """

    rows: slice | None
    elements: slice

    @property
    def is_whole(self) -> bool:
        return self.rows is None

    def of(self, tensor: Tensor) -> Tensor:
        if self.rows is None:
            return tensor
        shard = local(tensor)
        return shard[self.rows] if shard.ndim else shard.view(1)


class StateFormat(ABC):
    """How one of a parameter's states is kept, under its name in `kept` and maybe under others that begin with it."""

    dtype: torch.dtype | None  # of each element; None: that in which the state is computed

    @abstractmethod
    def new(self, name: str, like: Tensor, dtype: torch.dtype, device: torch.device) -> Kept:
        """Room for a state of the shape of `like` that is computed in this dtype."""

    @abstractmethod
    def read(self, kept: Kept, name: str, piece: Piece, like: Tensor) -> Tensor:
        """A piece of the state, in the dtype and the layout of `like`."""

    @abstractmethod
    def write(self, kept: Kept, name: str, piece: Piece, exact: Tensor, seed: int) -> None:
        """The inverse of `read`. Noise depends on the seed, or is drawn from the default generator."""


@final
class InDtype(StateFormat):
    """One tensor in a dtype. If it has fewer bits than the state is computed in, it is rounded stochastically."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def new(self, name: str, like: Tensor, dtype: torch.dtype, device: torch.device) -> Kept:
        return {name: torch.empty_like(like, dtype=self.dtype or dtype, device=device, requires_grad=False)}

    def read(self, kept: Kept, name: str, piece: Piece, like: Tensor) -> Tensor:
        return on_mesh(piece.of(kept[name])).to(like.dtype)

    def write(self, kept: Kept, name: str, piece: Piece, exact: Tensor, seed: int) -> None:
        del seed
        rows = piece.of(kept[name])
        if rows.dtype is not exact.dtype:
            stochastically(rows, exact)
        elif not share_memory(rows, exact):
            local(rows).copy_(local(exact))


AS_COMPUTED = InDtype(None)


def share_memory(one: Tensor, other: Tensor) -> bool:
    return local(one).untyped_storage() is local(other.detach()).untyped_storage()
