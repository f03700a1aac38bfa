"""What a sequence of allocations does to the caching allocator: its peaks, and the least memory in which it fits.
Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import NamedTuple

from lowvram.planning.memory.allocator import CachingAllocator, OutOfMemory
from lowvram.planning.memory.segments import LARGE_SEGMENT_BYTES, ROUND_LARGE_BYTES, Block

FREE = -1  # the bytes of an event that frees


class Event(NamedTuple):
    """An allocation is born, or dies. A plain tuple of the three does as well, and is made sooner."""

    allocation: int  # any number that is its own while it lives
    num_bytes: int  # as asked for; FREE, or anything negative, at its death. 0 never reaches the allocator
    stream: int = 0  # that it belongs to, at its death too: what one stream freed no other gets


Events = Sequence[Event | tuple[int, int, int]]


class Oom(NamedTuple):
    """Where a sequence ran out of memory."""

    event: int  # its index in the sequence
    asked_bytes: int
    allocated_bytes: int  # before it
    reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """What a sequence of events did, up to its end or to where memory ran out."""

    allocated_bytes: int  # there: torch.cuda.memory_allocated()
    reserved_bytes: int  # torch.cuda.memory_reserved()
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    granted_bytes: int  # with any limit from this one on
    refused_bytes: int  # and below this one, the same happens
    num_retries: int  # times that all free segments had to be given back first, which waits for the device
    oom: Oom | None


class Run:
    """A replay under way."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.living: dict[int, Block] = {}  # by allocation
        self.num_played = 0

    def play(self, events: Events) -> Replay:
        """Those of the events that weren't played yet, to the end or to where memory runs out."""
        allocator, living, oom = self.allocator, self.living, None
        malloc, free = allocator.malloc, allocator.free
        rest = iter(events[self.num_played :])
        self.num_played = len(events)
        try:
            for allocation, num_bytes, stream in rest:
                if num_bytes > 0:
                    living[allocation] = malloc(num_bytes, stream)
                elif num_bytes < 0:
                    free(living.pop(allocation), stream)
        except OutOfMemory:
            self.num_played -= 1 + length_hint(rest)  # the one that found no room, and all after it
            asked_bytes = events[self.num_played][1]
            oom = Oom(self.num_played, asked_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
        return Replay(
            allocator.allocated_bytes,
            allocator.reserved_bytes,
            allocator.allocated_peak_bytes,
            allocator.reserved_peak_bytes,
            allocator.granted_bytes,
            allocator.refused_bytes,
            allocator.num_retries,
            oom,
        )

    def copied(self, limit_bytes: int | None) -> Run:
        """The same under another limit, that would have changed nothing so far."""
        run = Run(self.allocator.copied(limit_bytes))
        run.living, run.num_played = self.living.copy(), self.num_played
        return run


def replay(
    events: Events,
    *,
    expandable: bool = False,
    limit_bytes: int | None = None,
    device_bytes: int | None = None,
) -> Replay:
    """Run the events through an empty allocator; the options are `CachingAllocator`'s."""
    return Run(CachingAllocator(expandable, limit_bytes, device_bytes)).play(events)


class Needs(NamedTuple):
    """What a sequence of events needs."""

    free: Replay  # without any limit
    least_limit_bytes: int


@contextmanager
def garbage_later() -> Iterator[None]:
    """Events and blocks are many, and they live: looking among them for garbage takes a tenth of a price's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@garbage_later()
def needs_of(events: Events, *, expandable: bool = False, live_peak_bytes: int = 0, tolerance: float = 0.0) -> Needs:
    """What happens without a limit, and the least limit (as of `torch.cuda.set_per_process_memory_fraction`) under
    which the events fit, a multiple of 2 MiB, by which everything is reserved.

    By trial between bounds. A trial answers for all limits under which the same happens, so a few are enough. What fits
    under a limit fits under a larger one but for rare accidents of best fit, so a still lower limit may do. Under the
    one that is returned they do fit.

    What happens before the lowest of the limits that may do would refuse anything happens under all of them: it is
    played once, further each time that more is known of the lowest, and each trial goes on from a copy of that. Where
    it stops, what the allocator keeps there tells of limits under which giving it back would not be enough.

    Args:
        live_peak_bytes: the most that is asked for at a time, or anything less, which takes longer.
        tolerance: the share of the limit by which it may be larger than the least. Each trial is a replay.
    """
    common = Run(CachingAllocator(expandable, lowest_limit_bytes(live_peak_bytes), gives_back=False))
    common.play(events)
    free = common.copied(None).play(events)
    lowest, highest = lowest_limit_bytes(free.allocated_peak_bytes), free.granted_bytes
    while highest - lowest > tolerance * highest:
        common.allocator.limit_bytes = lowest
        shared = common.play(events)
        if shared.oom is None:
            highest = shared.granted_bytes
        elif shared.refused_bytes > lowest:
            lowest = shared.refused_bytes
        else:
            tried = common.copied((lowest + highest) // 2).play(events)
            if tried.oom is None:
                highest = tried.granted_bytes
            else:
                lowest = tried.refused_bytes
    return Needs(free, highest)


def lowest_limit_bytes(allocated_peak_bytes: int) -> int:
    """That may do: the last pages of an expandable segment may reach beyond the limit."""
    return max(0, allocated_peak_bytes - LARGE_SEGMENT_BYTES) // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
