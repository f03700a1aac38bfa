"""Replays a sequence of allocations through the simulated allocator: its peaks, and the least memory in which it fits.
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

FREE = -1  # `num_bytes` of an event that frees


class Event(NamedTuple):
    """An allocation or a free. A plain tuple of the three works as well, and is faster to make."""

    allocation: int  # identifies the allocation until it is freed
    num_bytes: int  # as requested; FREE, or any negative number: a free. Events of 0 bytes are skipped
    stream: int = 0  # a free must name the stream of its allocation: a stream reuses only its own blocks


Events = Sequence[Event | tuple[int, int, int]]


class Oom(NamedTuple):
    """Where a sequence ran out of memory."""

    event: int  # its index in the sequence
    asked_bytes: int
    allocated_bytes: int  # before it
    reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """The allocator's figures after a sequence of events, at its end or where memory ran out."""

    allocated_bytes: int  # torch.cuda.memory_allocated()
    reserved_bytes: int  # torch.cuda.memory_reserved()
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    granted_bytes: int  # any limit from this one on
    refused_bytes: int  # and below this one would have given the same figures
    num_retries: int  # how often all free segments had to be returned first, which waits for the device
    oom: Oom | None


class Run:
    """A replay that can be continued and copied."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.living: dict[int, Block] = {}  # allocated blocks, by allocation
        self.num_played = 0

    def play(self, events: Events) -> Replay:
        """Replay the events after the first `num_played`, to the end or to where memory runs out."""
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
            self.num_played -= 1 + length_hint(rest)  # without the event that failed and those after it
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
        """A copy with another limit, which must be one that would have changed nothing so far."""
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
    """Replay the events through an empty allocator; the options are `CachingAllocator`'s."""
    return Run(CachingAllocator(expandable, limit_bytes, device_bytes)).play(events)


class Needs(NamedTuple):
    """The memory that a sequence of events needs."""

    free: Replay  # without any limit
    least_limit_bytes: int


@contextmanager
def gc_off() -> Iterator[None]:
    """Garbage collection is off inside: scanning the many live events and blocks would take a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@gc_off()
def needs_of(events: Events, *, expandable: bool = False, live_peak_bytes: int = 0, tolerance: float = 0.0) -> Needs:
    """Replay without a limit, and find the least limit (of `torch.cuda.set_per_process_memory_fraction`) under which
    the events fit. It is a multiple of 2 MiB, as all segments are.

    Searches by bisection. A trial's result holds for all limits that lead to the same figures, so a few trials are
    enough. With best fit, events may in rare cases fit under a limit but not under a larger one. So an even lower limit
    may exist; under the one returned the events do fit.

    The search narrows an interval from `lowest` to `highest`. Up to the first event that `lowest` refuses, all limits
    in the interval lead to the same state. `common` replays these events once and continues as `lowest` rises; each
    trial continues from a copy of it. Where `common` stops, the size of its cache gives a limit below which even
    freeing the cache wouldn't be enough.

    Args:
        live_peak_bytes: a lower bound of the largest sum of live allocations; the closer, the faster.
        tolerance: by how much the result may exceed the least limit, relative to the result.
    """
    common = Run(CachingAllocator(expandable, lowest_limit_bytes(live_peak_bytes), frees_cache=False))
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


def further_steps(events: Events, start: int, num_steps: int) -> list[tuple[int, int, int]]:
    """`num_steps` repetitions of the step from event `start` to the end, under new allocation numbers. A step frees
    allocations of the step before it and leaves some to the next one; these are matched by age. Empty if their sizes
    differ, as the step then isn't a steady state."""
    step, sizes = events[start:], {allocation: size for allocation, size, _ in events if size > 0}
    lives_on: dict[int, bool] = {}  # whether an allocation that the step makes or frees is alive at its end
    inherited = []
    for allocation, size, _ in step:
        if size < 0 and allocation not in lives_on:
            inherited.append(allocation)
        lives_on[allocation] = size > 0
    inherited.sort()
    left = sorted(allocation for allocation, is_left in lives_on.items() if is_left)
    if [sizes[allocation] for allocation in inherited] != [sizes[allocation] for allocation in left]:
        return []
    names, more = {allocation: allocation for allocation in left}, list[tuple[int, int, int]]()
    num_names = max(sizes, default=0) + 1
    for number in range(1, num_steps + 1):
        names = {mine: names[its] for mine, its in zip(inherited, left, strict=True)}
        for allocation, size, stream in step:
            if size > 0:
                names[allocation] = allocation + number * num_names
            more.append((names[allocation], size, stream))
    return more


def lowest_limit_bytes(allocated_peak_bytes: int) -> int:
    """The lowest limit that could be enough: less than the peak, as the last pages of an expandable segment may reach
    beyond the limit."""
    return max(0, allocated_peak_bytes - LARGE_SEGMENT_BYTES) // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
