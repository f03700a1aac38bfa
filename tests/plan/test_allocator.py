"""The replayed allocator: cases worked out by hand, an allocator made without any cleverness, and what always holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lowvram.plan.allocator import MIB, SMALL_BYTES, Block, CachingAllocator, OutOfMemory, Pool, segment_bytes
from lowvram.plan.replay import FREE, Event, Oom, least_limit_bytes, replay

both = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
seeds = pytest.mark.parametrize("seed", range(5))


# By hand


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved", "reserved_expandable"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (512, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB, 20 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB, 40 * MIB),
    ],
)
def test_one_allocation(asked: int, allocated: int, reserved: int, reserved_expandable: int) -> None:
    default, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    default.malloc(asked)
    expandable.malloc(asked)
    assert expandable.allocated_bytes == allocated
    rest_bytes = reserved - allocated
    is_split = rest_bytes > MIB or asked <= MIB
    assert default.allocated_bytes == (allocated if is_split else reserved)
    assert (default.reserved_bytes, expandable.reserved_bytes) == (reserved, reserved_expandable)


def test_up_to_a_mebibyte_is_left_at_the_end_of_a_large_block() -> None:
    default, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    assert default.malloc(19 * MIB).num_bytes == 20 * MIB
    assert expandable.malloc(19 * MIB).num_bytes == 19 * MIB


def test_a_cublas_workspace_as_seen_on_a_device() -> None:
    """discuss.pytorch.org/t/178671: 8519680 B in a segment of 20971520 B, of which 12451840 B are left."""
    allocator = CachingAllocator()
    block = allocator.malloc(8519680)
    assert block.after is not None
    assert (block.num_bytes, block.after.num_bytes, allocator.reserved_bytes) == (8519680, 12451840, 20971520)


def test_the_best_fit_is_the_smallest_and_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(num_mib * MIB) for num_mib in (4, 2, 3, 2, 3)]  # in one segment of 20 MiB
    addresses = [block.address for block in blocks]
    assert addresses == [0, 4 * MIB, 6 * MIB, 9 * MIB, 11 * MIB]
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    assert allocator.malloc(3 * MIB).address == addresses[2]
    assert allocator.malloc(3 * MIB).address == addresses[0]
    assert allocator.malloc(3 * MIB).address == addresses[4]
    assert allocator.reserved_bytes == 20 * MIB


@both
def test_what_one_stream_freed_no_other_gets(expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    first = allocator.malloc(4 * MIB, stream=0)
    allocator.free(first)
    assert allocator.malloc(4 * MIB, stream=1).address != first.address
    assert allocator.malloc(4 * MIB, stream=0).address == first.address
    assert allocator.reserved_bytes == 40 * MIB


@both
def test_what_another_stream_still_uses_is_not_allocated_and_not_free(expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    first = allocator.malloc(4 * MIB)
    allocator.request_free(first)
    assert allocator.allocated_bytes == 0
    assert allocator.malloc(4 * MIB).address == first.address + 4 * MIB
    allocator.complete_free(first)
    assert allocator.malloc(4 * MIB).address == first.address


def test_a_new_expandable_page_joins_what_is_free_before_it() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(15 * MIB) for _ in range(3)]
    assert [block.address for block in blocks] == [0, 15 * MIB, 30 * MIB]
    assert allocator.reserved_bytes == 60 * MIB


def test_what_lies_before_unused_addresses_is_taken_last() -> None:
    """2 MiB are free at the end of what is mapped, and 4 MiB at its beginning: the smaller could grow."""
    allocator = CachingAllocator(expandable=True)
    first, _ = allocator.malloc(4 * MIB), allocator.malloc(14 * MIB)
    allocator.free(first)
    assert allocator.malloc(3 * MIB // 2).address == 0


def test_pages_given_back_are_the_first_to_be_mapped_again() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(12 * MIB).address == 20 * MIB
    assert allocator.malloc(8 * MIB).address == 32 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_a_page_is_given_back_only_as_a_whole() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(num_mib * MIB) for num_mib in (10, 40, 10)]  # pages end at 20, 40, 60
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    check(allocator, [blocks[0], blocks[2]])


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    events = [Event(0, 16 * MIB), Event(0, FREE), Event(1, 30 * MIB)]
    assert replay(events).reserved_bytes == [16 * MIB, 16 * MIB, 46 * MIB]
    limited = replay(events, limit_bytes=40 * MIB)
    assert (limited.reserved_bytes, limited.num_retries, limited.oom) == ([16 * MIB, 16 * MIB, 30 * MIB], 1, None)
    assert limited.reserved_peak_bytes == 30 * MIB


def test_the_peak_stays_when_memory_is_given_back() -> None:
    events = [Event(0, 38 * MIB), Event(0, FREE), Event(1, 20 * MIB, stream=1)]
    done = replay(events, limit_bytes=40 * MIB)
    assert (done.reserved_bytes[-1], done.reserved_peak_bytes, done.allocated_peak_bytes) == (20 * MIB, *[38 * MIB] * 2)


@pytest.mark.parametrize("limit", ["limit_bytes", "device_bytes"])
@both
def test_where_memory_ran_out(expandable: bool, limit: str) -> None:
    events = [Event(0, 1000), Event(1, 20 * MIB), Event(2, 21 * MIB), Event(2, FREE)]
    done = replay(events, expandable=expandable, **{limit: 40 * MIB})
    assert done.oom == Oom(event=2, asked_bytes=21 * MIB, allocated_bytes=20 * MIB + 1024, reserved_bytes=22 * MIB)
    assert done.allocated_bytes == [1024, 20 * MIB + 1024]
    assert done.num_retries == 1


def test_under_a_limit_expandable_segments_ask_for_more_than_they_need() -> None:
    """18.5 MiB are free at the end, 20 MiB more would do for 38: but the limit is compared with 38 more."""
    events = [Event(0, 3 * MIB // 2), Event(1, 38 * MIB)]
    assert replay(events, expandable=True).reserved_peak_bytes == 40 * MIB
    assert replay(events, expandable=True, device_bytes=40 * MIB).oom is None
    assert replay(events, expandable=True, device_bytes=40 * MIB - 1).oom is not None
    assert replay(events, expandable=True, limit_bytes=40 * MIB).oom is not None
    assert least_limit_bytes(events, expandable=True) == 58 * MIB
    assert least_limit_bytes(events) == 58 * MIB


def test_the_least_limit_is_less_than_what_is_reserved_without_one() -> None:
    events = [Event(0, 16 * MIB), Event(0, FREE), Event(1, 30 * MIB), Event(1, FREE), Event(2, 44 * MIB)]
    assert replay(events).reserved_peak_bytes == 90 * MIB
    assert least_limit_bytes(events) == 44 * MIB


def test_nothing_takes_nothing() -> None:
    assert least_limit_bytes([]) == 0
    assert replay([Event(0, 0), Event(0, 0)]).reserved_bytes == [0, 0]  # nothing is asked for a tensor of no bytes


def test_what_was_never_born_cannot_die() -> None:
    with pytest.raises(KeyError):
        replay([Event(7, FREE)])


# Any sequence


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
            allocator.empty_cache()
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
    limit_bytes = least_limit_bytes(events, expandable=expandable)
    free = replay(events, expandable=expandable)
    assert replay(events, expandable=expandable, limit_bytes=limit_bytes).oom is None
    assert replay(events, expandable=expandable, limit_bytes=limit_bytes - 2 * MIB).oom is not None
    assert limit_bytes >= free.allocated_peak_bytes - 20 * MIB
    assert limit_bytes <= free.reserved_peak_bytes + (40 * MIB if expandable else 0)


@both
def test_a_sequence_has_one_outcome(expandable: bool) -> None:
    events = sequence(0)
    done = replay(events, expandable=expandable)
    assert done == replay(events, expandable=expandable)
    assert done.allocated_peak_bytes == max(done.allocated_bytes)
    assert done.reserved_peak_bytes == max(done.reserved_bytes)
    assert len(done.reserved_bytes) == len(done.allocated_bytes) == len(events)


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
    done = replay(events)
    assert (done.allocated_bytes, done.reserved_bytes) == (allocated, reserved)
