"""What a sequence of allocations does to the caching allocator: its peaks, and the least memory in which it fits.
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowvram.plan.allocator import CachingAllocator, OutOfMemory
from lowvram.plan.blocks import LARGE_SEGMENT_BYTES, ROUND_LARGE_BYTES, Block

FREE = -1  # the bytes of an event that frees


class Event(NamedTuple):
    """An allocation is born, or dies."""

    allocation: int  # any number that is its own while it lives
    num_bytes: int  # as asked for; FREE, or anything negative, at its death. 0 never reaches the allocator
    stream: int = 0  # that it belongs to: what one stream freed no other gets


class Oom(NamedTuple):
    """Where a sequence ran out of memory."""

    event: int  # its index in the sequence
    asked_bytes: int
    allocated_bytes: int  # before it
    reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """What a sequence of events did, up to its end or to where memory ran out."""

    allocated_bytes: list[int]  # after each event: torch.cuda.memory_allocated()
    reserved_bytes: list[int]  # torch.cuda.memory_reserved()
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    granted_bytes: int  # with any limit from this one on
    refused_bytes: int  # and below this one, the same happens
    num_retries: int  # times that all free segments had to be given back first, which waits for the device
    oom: Oom | None


def replay(
    events: Sequence[Event],
    *,
    expandable: bool = False,
    limit_bytes: int | None = None,
    device_bytes: int | None = None,
) -> Replay:
    """Run the events through an empty allocator; the options are `CachingAllocator`'s."""
    allocator = CachingAllocator(expandable, limit_bytes, device_bytes)
    live: dict[int, Block] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    oom = None
    for allocation, num_bytes, stream in events:
        if num_bytes > 0:
            try:
                live[allocation] = allocator.malloc(num_bytes, stream)
            except OutOfMemory:
                oom = Oom(len(allocated), num_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
                break
        elif num_bytes < 0:
            allocator.free(live.pop(allocation))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        allocated,
        reserved,
        allocator.allocated_peak_bytes,
        allocator.reserved_peak_bytes,
        allocator.granted_bytes,
        allocator.refused_bytes,
        allocator.num_retries,
        oom,
    )


def least_limit_bytes(events: Sequence[Event], *, expandable: bool = False, free: Replay | None = None) -> int:
    """The least limit (as of `torch.cuda.set_per_process_memory_fraction`) under which the events fit, a multiple of
    2 MiB, by which everything is reserved.

    By trial between bounds, nearer to the lower one, where it mostly lies. A trial answers for all limits under which
    the same happens, so a few are enough. What fits under a limit fits under a larger one but for rare accidents of
    best fit, so a still lower limit may do. Under the one that is returned they do fit.

    Args:
        free: their replay without a limit, if it is known.
    """
    free = free or replay(events, expandable=expandable)
    # The last pages of an expandable segment may reach beyond the limit.
    lowest = max(0, free.allocated_peak_bytes - LARGE_SEGMENT_BYTES) // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
    highest = free.granted_bytes
    while lowest < highest:
        tried = replay(events, expandable=expandable, limit_bytes=lowest + (highest - lowest) // 4)
        if tried.oom is None:
            highest = tried.granted_bytes
        else:
            lowest = tried.refused_bytes
    return highest
