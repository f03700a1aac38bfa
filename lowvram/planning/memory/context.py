"""How much memory the CUDA context of a process takes, which lies outside of torch's allocator. Imports no torch.

A context holds local memory for each multiprocessor, and the code of the kernels that a process has used so far. So it
grows with the card, and during a run. Sizes of the cards on which it was measured bound it for others.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 2**20


class Measured(NamedTuple):
    """What the context of a process took."""

    card: str
    multiprocessors: int
    mib: int
    where: str


XMEM = "with CUDA 12.4, in xMem's published measurements"
UNSLOTH = "with torch 2.10.0+cu130, before any kernel was loaded, github.com/unslothai/unsloth-zoo/pull/1053"
SMALLEST = Measured("RTX 3060", 28, 107, XMEM)
UNUSED = Measured("RTX 6000 Ada", 142, 426, UNSLOTH)
LARGEST = Measured("H200", 132, 840, "with torch 2.11.0+cu130, at the end of a point, docs/planning.md")

SLOPE_MIB = (UNUSED.mib - SMALLEST.mib) / (UNUSED.multiprocessors - SMALLEST.multiprocessors)
FIXED_MIB = SMALLEST.mib - SLOPE_MIB * SMALLEST.multiprocessors
LARGEST_SLOPE_MIB = (LARGEST.mib - FIXED_MIB) / LARGEST.multiprocessors
SOURCE = "by the card's multiprocessors, between what contexts took on " + ", ".join(
    f"an {each.card} ({each.multiprocessors}: {each.mib} MiB {each.where})" for each in (SMALLEST, UNUSED, LARGEST)
)


def context_bytes(multiprocessors: int | None) -> tuple[int, int]:
    """The least and the most that a context takes on a card; None: of one whose multiprocessors aren't known."""
    if multiprocessors is None:
        return SMALLEST.mib * MIB, LARGEST.mib * MIB
    least, most = (round(FIXED_MIB + slope * multiprocessors) * MIB for slope in (SLOPE_MIB, LARGEST_SLOPE_MIB))
    return least, most
