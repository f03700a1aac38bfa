"""The replayed allocator: what holds for any sequence, and an allocator without any cleverness beside it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from lowvram.planner.allocator import CachingAllocator, OutOfMemory
from lowvram.planner.blocks import MIB, SMALL_BYTES, Block, Pool, segment_bytes
from lowvram.planner.replay import FREE, Event, Replay, Run, needs_of, replay

both = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
seeds = pytest.mark.parametrize("seed", range(5))


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


def segments(allocator: CachingAllocator, living: list[Block]) -> list[list[Block]]:
    """All blocks, by segment."""
    known = list(living)
    for pool in allocator.pools.values():
        known += [block for *_, block in [*pool.free, *pool.unmapped]]
    found = []
    for head in known:
        if head.before is None:
            blocks = [head]
            while blocks[-1].after is not None:
                blocks.append(blocks[-1].after)
            found.append(blocks)
    assert sorted(map(id, known)) == sorted(id(block) for blocks in found for block in blocks)  # each once
    return found


def check(allocator: CachingAllocator, living: list[Block]) -> None:
    """What holds after every event."""
    ends = 0
    for blocks in sorted(segments(allocator, living), key=lambda blocks: blocks[0].address):
        assert blocks[0].address >= ends, "segments overlap"
        for left, right in pairwise(blocks):
            assert left.address + left.num_bytes == right.address, "blocks follow one another"
            assert right.before is left
            assert not (left.is_free and right.is_free and left.is_mapped == right.is_mapped), "free neighbours join"
            assert left.pool is right.pool
        assert all(block.num_bytes > 0 and block.num_bytes % 512 == 0 for block in blocks)
        ends = blocks[-1].address + blocks[-1].num_bytes
    mapped = [block for blocks in segments(allocator, living) for block in blocks if block.is_mapped]
    assert allocator.reserved_bytes == sum(block.num_bytes for block in mapped)
    assert allocator.allocated_bytes == sum(block.num_bytes for block in living) <= allocator.reserved_bytes
    assert not any(block.is_free for block in living)
    for pool in allocator.pools.values():
        check_lists(pool)


def check_lists(pool: Pool) -> None:
    assert [each[:2] for each in pool.free] == sorted((block.num_bytes, block.address) for *_, block in pool.free)
    assert [each[0] for each in pool.unmapped] == sorted(block.address for _, block in pool.unmapped)
    assert all(block.is_free and block.is_mapped for *_, block in pool.free)
    assert all(block.is_free and not block.is_mapped for _, block in pool.unmapped)


def play(allocator: CachingAllocator, events: list[Event], living: dict[int, Block]) -> Iterator[None]:
    """Event by event; keeps the living blocks."""
    for allocation, num_bytes, stream in events:
        if num_bytes > 0:
            living[allocation] = allocator.malloc(num_bytes, stream)
            assert living[allocation].num_bytes >= num_bytes
            assert living[allocation].pool.is_small == (num_bytes <= SMALL_BYTES)
        else:
            allocator.free(living.pop(allocation))
        yield


@seeds
@both
def test_nothing_overlaps_and_nothing_is_lost(expandable: bool, seed: int) -> None:
    allocator = CachingAllocator(expandable)
    living: dict[int, Block] = {}
    for index, _ in enumerate(play(allocator, sequence(seed), living)):
        if index % 5 == 0:
            check(allocator, list(living.values()))
        if index % 150 == 149:  # whenever it is asked to
            left_bytes = allocator.reserved_bytes - allocator.kept_bytes()
            allocator.empty_cache()
            assert allocator.reserved_bytes == left_bytes
            check(allocator, list(living.values()))
    for block in living.values():
        allocator.free(block)
    check(allocator, [])
    assert allocator.allocated_bytes == 0 < allocator.reserved_bytes
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert segments(allocator, []) == []


@seeds
@both
def test_under_a_limit_too(expandable: bool, seed: int) -> None:
    events = sequence(seed)
    limit_bytes = replay(events, expandable=expandable).allocated_peak_bytes * 3 // 4
    allocator = CachingAllocator(expandable, limit_bytes)
    living: dict[int, Block] = {}

    def run() -> None:
        for _ in play(allocator, events, living):  # the last page of an expandable segment may reach beyond the limit
            assert allocator.reserved_bytes <= limit_bytes + (20 * MIB if expandable else 0)

    with pytest.raises(OutOfMemory):
        run()
    check(allocator, list(living.values()))


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
    check(limited.allocator, list(limited.living.values()))
    assert limited.play(events) == replay(events, expandable=expandable, limit_bytes=limit_bytes)
    assert free.play(events) == replay(events, expandable=expandable)
    check(start.allocator, list(start.living.values()))
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
    """It would take longer over the blocks than the replay did. Left is an allocator or two without any."""
    found = []
    for num_events in (100, 700):
        gc.collect()
        needs_of(sequence(0, num_events), expandable=expandable, tolerance=1.0)
        found.append(gc.collect())
    assert found[0] == found[1] < 50


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
