"""The last layer for options that treat it otherwise than the others."""

from __future__ import annotations

from torch import Tensor

from lowvram.core.mesh import all_ranks
from lowvram.core.structure import Structure

TOLD: set[str] = set()  # options whose line was printed


def known_last_weights(known: Structure, option: str) -> set[Tensor]:
    """`Structure.last_weights`; if they aren't known, a line says so, once for each option."""
    last = known.last_weights
    if not last and option not in TOLD and all_ranks().is_first:
        TOLD.add(option)
        print(f"{option}: which layer is the model's last isn't known, so each is treated as an inner one", flush=True)
    return last
