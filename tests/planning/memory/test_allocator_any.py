"""The replayed allocator: what holds for any sequence, and an allocator without any cleverness beside it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from lowvram.planning.memory.allocator import CachingAllocator, OutOfMemory
from lowvram.planning.memory.replay import FREE, Event, Replay, Run, needs_of, replay
from lowvram.planning.memory.segments import MIB, SMALL_BYTES, Block, BlockSet, Pool, segment_bytes

both = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
seeds = pytest.mark.parametrize("seed", range(5))
Living = dict[int, tuple[Block, int]]  # block and stream, by allocation


def sequence(seed: int, num_events: int = 700, num_streams: int = 2) -> list[Event]:
    """Births and deaths of all sizes; phases in which more is born, or more dies."""
    draw = random.Random(seed)
    events: list[Event] = []
    living: list[tuple[int, int]] = []
    while len(events) < num_events:
        if living and draw.random() < (0.3, 0.65)[len(events) // 100 % 2]:
            allocation, stream = living.pop(draw.randrange(len(living)))
            events.append(Event(allocation, FREE, stream))
        else:
            living.append((len(events), draw.randrange(num_streams)))
            events.append(Event(len(events), int(2 ** draw.uniform(4, 25)), living[-1][1]))
    return events


def after_each(events: list[Event], **options: Any) -> list[Replay]:
    """What a replay has done after each event, up to where memory runs out."""
    run, found = Run(CachingAllocator(**options)), []
    while len(found) < len(events) and (not found or found[-1].oom is None):
        found.append(run.play(events[: len(found) + 1]))
    return found


def check(allocator: CachingAllocator, living: Living) -> None:
    """What holds after every event."""
    used: dict[Pool, list[Block]] = {pool: [] for pool in allocator.pools()}
    for block, stream in living.values():
        used[(allocator.small if block[0] <= SMALL_BYTES else allocator.large)[stream]].append(block)
    segments = sorted(segment for pool in used for segment in pool.segments.items())
    assert all(start + num_bytes <= other for (start, num_bytes), (other, _) in pairwise(segments)), "segments overlap"
    for pool, blocks in used.items():
        check_pool(pool, blocks)
    free_bytes = sum(num_bytes for pool in used for num_bytes, _ in pool.free.in_order)
    assert allocator.allocated_bytes == sum(num_bytes for blocks in used.values() for num_bytes, _ in blocks)
    assert allocator.reserved_bytes == allocator.allocated_bytes + free_bytes


def check_pool(pool: Pool, blocks: list[Block]) -> None:
    """Blocks, free stretches and unmapped ones follow one another in each segment, and no two that could be joined."""
    assert not pool.freed
    check_order(pool.free)
    check_order(pool.unmapped)
    kinds = {"block": blocks, "free": pool.free.in_order, "unmapped": pool.unmapped.in_order}
    parts = sorted((address, num_bytes, kind) for kind, each in kinds.items() for num_bytes, address in each)
    assert all(num_bytes > 0 and num_bytes % 512 == 0 for _, num_bytes, _ in parts)
    ends = {start + num_bytes for start, num_bytes in pool.segments.items()}
    begins = {address for address, _, _ in parts}
    assert pool.segments.keys() <= begins
    for address, num_bytes, kind in parts:
        end = address + num_bytes
        if end in ends:
            continue
        assert end in begins, "nothing follows"
        assert kind == "block" or kind not in [other for at, _, other in parts if at == end], "free neighbours join"
    assert sum(num_bytes for _, num_bytes, _ in parts) == sum(pool.segments.values())


def check_order(blocks: BlockSet) -> None:
    order = blocks.in_order
    assert order == sorted(order)
    assert blocks.beginning == {address: (num_bytes, address) for num_bytes, address in order}
    assert blocks.ending == {address + num_bytes: (num_bytes, address) for num_bytes, address in order}


def play(allocator: CachingAllocator, events: list[Event], living: Living) -> Iterator[None]:
    """Event by event; keeps the living blocks."""
    for allocation, num_bytes, stream in events:
        if num_bytes > 0:
            block = allocator.malloc(num_bytes, stream)
            living[allocation] = block, stream
            assert block[0] >= num_bytes
            assert (block[0] <= SMALL_BYTES) == (num_bytes <= SMALL_BYTES)
        else:
            allocator.free(*living.pop(allocation))
        yield


def living_of(run: Run, events: list[Event]) -> Living:
    """An allocation's number is its event's."""
    return {allocation: (block, events[allocation].stream) for allocation, block in run.living.items()}


@seeds
@both
def test_nothing_overlaps_and_nothing_is_lost(expandable: bool, seed: int) -> None:
    allocator = CachingAllocator(expandable)
    living: Living = {}
    for index, _ in enumerate(play(allocator, sequence(seed), living)):
        if index % 5 == 0:
            check(allocator, living)
        if index % 150 == 149:  # whenever it is asked to
            left_bytes = allocator.reserved_bytes - allocator.kept_bytes()
            allocator.empty_cache()
            assert allocator.reserved_bytes == left_bytes
            check(allocator, living)
    for block, stream in living.values():
        allocator.free(block, stream)
    check(allocator, {})
    assert allocator.allocated_bytes == 0 < allocator.reserved_bytes
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not any(pool.segments for pool in allocator.pools())
    check(allocator, {})


@seeds
@both
def test_under_a_limit_too(expandable: bool, seed: int) -> None:
    events = sequence(seed)
    limit_bytes = replay(events, expandable=expandable).allocated_peak_bytes * 3 // 4
    allocator = CachingAllocator(expandable, limit_bytes)
    living: Living = {}

    def run() -> None:
        for _ in play(allocator, events, living):  # the last page of an expandable segment may reach beyond the limit
            assert allocator.reserved_bytes <= limit_bytes + (20 * MIB if expandable else 0)

    with pytest.raises(OutOfMemory):
        run()
    check(allocator, living)


@seeds
@both
def test_the_least_limit_fits_and_less_does_not(expandable: bool, seed: int) -> None:
    events = sequence(seed, num_events=400)
    limit_bytes = needs_of(events, expandable=expandable).least_limit_bytes
    free = replay(events, expandable=expandable)
    assert replay(events, expandable=expandable, limit_bytes=limit_bytes).oom is None
    assert replay(events, expandable=expandable, limit_bytes=limit_bytes - 2 * MIB).oom is not None
    assert limit_bytes >= free.allocated_peak_bytes - 20 * MIB
    assert limit_bytes <= free.reserved_peak_bytes + (40 * MIB if expandable else 0)


@seeds
@both
def test_limits_between_what_was_granted_and_refused_change_nothing(expandable: bool, seed: int) -> None:
    events = sequence(seed, num_events=400)
    least = needs_of(events, expandable=expandable).least_limit_bytes
    for limit_bytes in (least, least - 2 * MIB, least - 20 * MIB):
        done = after_each(events, expandable=expandable, limit_bytes=limit_bytes)
        granted_bytes, refused_bytes = done[-1].granted_bytes, done[-1].refused_bytes
        assert granted_bytes <= limit_bytes < refused_bytes
        for other in (granted_bytes, refused_bytes - 1):
            assert after_each(events, expandable=expandable, limit_bytes=other) == done
        assert done != after_each(events, expandable=expandable, limit_bytes=granted_bytes - 1)


@seeds
@both
def test_trials_may_share_what_happens_under_all_limits(expandable: bool, seed: int) -> None:
    events = sequence(seed, num_events=400)
    living: dict[int, int] = {}
    live_bytes = []
    for allocation, num_bytes, _ in events:
        living[allocation] = max(0, num_bytes)
        live_bytes.append(sum(living.values()))
    found = needs_of(events, expandable=expandable, live_peak_bytes=max(live_bytes))
    assert found == needs_of(events, expandable=expandable)
    assert found.free == replay(events, expandable=expandable)
    assert replay(events, expandable=expandable, limit_bytes=found.least_limit_bytes).oom is None


@seeds
@both
def test_less_exactness_needs_less_but_what_is_found_still_fits(expandable: bool, seed: int) -> None:
    events = sequence(seed, num_events=400)
    least = needs_of(events, expandable=expandable).least_limit_bytes
    near = needs_of(events, expandable=expandable, tolerance=0.1).least_limit_bytes
    assert least <= near <= least / (1 - 0.1)
    assert replay(events, expandable=expandable, limit_bytes=near).oom is None


@seeds
@both
def test_a_copy_goes_on_alone(expandable: bool, seed: int) -> None:
    events = sequence(seed, num_events=400)
    start = Run(CachingAllocator(expandable))
    start.play(events[:250])
    limit_bytes = start.allocator.granted_bytes
    limited, free = start.copied(limit_bytes), start.copied(None)
    check(limited.allocator, living_of(limited, events))
    assert limited.play(events) == replay(events, expandable=expandable, limit_bytes=limit_bytes)
    assert free.play(events) == replay(events, expandable=expandable)
    check(start.allocator, living_of(start, events))
    assert start.play(events) == replay(events, expandable=expandable)


@both
def test_a_sequence_has_one_outcome(expandable: bool) -> None:
    events = sequence(0)
    done = replay(events, expandable=expandable)
    each = after_each(events, expandable=expandable)
    assert len(each) == len(events)
    assert done == each[-1] == replay(events, expandable=expandable)
    assert done.allocated_peak_bytes == max(replay.allocated_bytes for replay in each)
    assert done.reserved_peak_bytes == max(replay.reserved_bytes for replay in each)


@both
def test_a_replay_leaves_nothing_to_the_garbage_collector(expandable: bool) -> None:
    """It would take longer over the blocks than the replay did."""
    events = sequence(0)
    gc.collect()
    needs_of(events, expandable=expandable, tolerance=1.0)
    assert gc.collect() == 0


class Naive:
    """The same rules (no limit, no expandable segments), looked up in one list without any order."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []  # [segment, address, bytes, is free, is small, stream]
        self.num_segments = 0

    def malloc(self, asked: int, stream: int) -> tuple[int, int]:
        num_bytes = -(-asked // 512) * 512
        is_small = int(num_bytes <= MIB)
        fits = [block for block in self.blocks if block[2] >= num_bytes and block[3:] == [1, is_small, stream]]
        if not fits:
            self.num_segments += 1
            fits = [[self.num_segments, 0, segment_bytes(num_bytes), 1, is_small, stream]]
            self.blocks += fits
        block = min(fits, key=lambda block: (block[2], block[:2]))
        rest_bytes = block[2] - num_bytes
        if rest_bytes >= (512 if is_small else MIB + 512):
            self.blocks.append([block[0], block[1] + num_bytes, rest_bytes, *block[3:]])
            block[2] = num_bytes
        block[3] = 0
        return block[0], block[1]

    def free(self, segment: int, address: int) -> None:
        block = next(block for block in self.blocks if block[:2] == [segment, address])
        block[3] = 1
        for other in [each for each in self.blocks if each[0] == segment and each[3] and each is not block]:
            if other[1] + other[2] == block[1] or block[1] + block[2] == other[1]:
                block[1], block[2] = min(block[1], other[1]), block[2] + other[2]
                self.blocks.remove(other)


@seeds
def test_an_allocator_without_cleverness_does_the_same(seed: int) -> None:
    events = sequence(seed, num_events=500)
    naive, places = Naive(), dict[int, tuple[int, int]]()
    allocated, reserved = [], []
    for allocation, num_bytes, stream in events:
        if num_bytes > 0:
            places[allocation] = naive.malloc(num_bytes, stream)
        else:
            naive.free(*places.pop(allocation))
        allocated.append(sum(block[2] for block in naive.blocks if not block[3]))
        reserved.append(sum(block[2] for block in naive.blocks))
    each = after_each(events)
    assert [replay.allocated_bytes for replay in each] == allocated
    assert [replay.reserved_bytes for replay in each] == reserved
