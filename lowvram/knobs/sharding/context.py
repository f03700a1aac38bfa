"""sharding=context: ranks compute the same samples, each a run of their tokens (runs.py, attention.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.core.kind import Kind
from lowvram.knobs.sharding.ddp import DDP


@dataclass(frozen=True)
class ContextParallel(DDP):
    """As `ddp` over rows of ranks; all ranks are one row, unless `context` says how many a row has."""

    context: int | None = None

    saves = Kind.ACTIVATIONS
