"""sharding=tensor: the layers of each block are split over ranks that compute the same samples (in_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.kind import Kind
from lowvram.knobs.sharding.ddp import DDP


@dataclass(frozen=True)
class TensorParallel(DDP):
    """As `ddp` over rows of ranks; all ranks are one row, unless `tensor` says how many a row has."""

    tensor: int | None = None

    saves = Kind.PARAMETERS
