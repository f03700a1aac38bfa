"""The bytes that the C library's malloc has allocated, sampled while a step runs on a CPU.

The ledger counts only tensors. This also counts what kernels, libraries and other threads allocate, so the difference
is memory that belongs to no tensor. Python's own small objects don't come from malloc.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import final

INTERVAL_S = 1e-3  # shorter allocations may be missed; large ones usually live longer
STACK_BYTES = 2**18  # of the thread that samples: `vram` counts stacks too


FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h (glibc 2.33 or newer)."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def allocated_bytes() -> int | None:
    """The bytes that malloc has allocated and that weren't freed; None with another C library than glibc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd  # in heaps, and in blocks with a mapping of their own


def grown_bytes(before: int | None) -> int:
    """How many bytes more malloc has allocated than before; 0 if that isn't known."""
    now = allocated_bytes()
    return 0 if before is None or now is None else now - before


@final
class MallocWatch:
    """Samples `allocated_bytes` inside its block, every `INTERVAL_S`. `peak_bytes` is the largest value so far."""

    def __init__(self) -> None:
        self.peak_bytes = allocated_bytes()
        self._is_over, self._thread = threading.Event(), threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MallocWatch:
        usual_bytes = threading.stack_size(STACK_BYTES)
        with suppress(RuntimeError):  # no memory for a thread: then only the first and the last sample are taken
            self._thread.start()
        threading.stack_size(usual_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._note()

    def _sample(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._note()

    def _note(self) -> None:
        if self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, allocated_bytes() or 0)
