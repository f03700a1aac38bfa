"""What kernels of Triton share. Imported when a card first needs it: torch for a CPU comes without Triton.

torch.compile makes kernels of formulas, too. Ours are launched in a fraction of the time that a call of its code takes
the host, and are one kernel each, where its compiler may split a formula and keep what lies between in memory.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LANES = 2048  # numbers for each program
UNIT = 16


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def bits_at_random(places, seed):
    """24 bits each, those of lowvram/core/rounding.py."""
    bits = places.to(tl.uint32) + seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return ((bits ^ (bits >> 16)) & 0xFFFFFF).to(tl.int32)


def unit_of(numel: int) -> int:
    """A number that divides `numel`: where it is large, Triton copies several numbers at a time."""
    return UNIT if numel % UNIT == 0 else 1
