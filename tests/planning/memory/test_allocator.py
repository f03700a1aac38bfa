"""The replayed allocator: cases worked out by hand."""

from __future__ import annotations

import gc

import pytest

from lowvram.planning.memory.allocator import CachingAllocator
from lowvram.planning.memory.replay import FREE, Event, Oom, further_steps, needs_of, replay
from lowvram.planning.memory.segments import MIB, Pool

both = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])


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
    assert default.malloc(19 * MIB) == (20 * MIB, 0)
    assert expandable.malloc(19 * MIB) == (19 * MIB, 0)


def test_a_cublas_workspace_as_seen_on_a_device() -> None:
    """discuss.pytorch.org/t/178671: 8519680 B in a segment of 20971520 B, of which 12451840 B are left."""
    allocator = CachingAllocator()
    assert allocator.malloc(8519680) == (8519680, 0)
    assert allocator.large[0].free.in_order == [(12451840, 8519680)]
    assert allocator.reserved_bytes == 20971520


def test_the_best_fit_is_the_smallest_and_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(num_mib * MIB) for num_mib in (4, 2, 3, 2, 3)]  # in one segment of 20 MiB
    addresses = [address for _, address in blocks]
    assert addresses == [0, 4 * MIB, 6 * MIB, 9 * MIB, 11 * MIB]
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    assert allocator.malloc(3 * MIB)[1] == addresses[2]
    assert allocator.malloc(3 * MIB)[1] == addresses[0]
    assert allocator.malloc(3 * MIB)[1] == addresses[4]
    assert allocator.reserved_bytes == 20 * MIB


@both
def test_what_one_stream_freed_no_other_gets(expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    first = allocator.malloc(4 * MIB, stream=0)
    allocator.free(first)
    assert allocator.malloc(4 * MIB, stream=1)[1] != first[1]
    assert allocator.malloc(4 * MIB, stream=0)[1] == first[1]
    assert allocator.reserved_bytes == 40 * MIB


@both
def test_what_another_stream_still_uses_is_not_allocated_and_not_free(expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    first = allocator.malloc(4 * MIB)
    allocator.request_free(first)
    assert allocator.allocated_bytes == 0
    assert allocator.malloc(4 * MIB)[1] == first[1] + 4 * MIB
    allocator.complete_free(first)
    assert allocator.malloc(4 * MIB)[1] == first[1]


def test_a_new_expandable_page_joins_what_is_free_before_it() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(15 * MIB) for _ in range(3)]
    assert [address for _, address in blocks] == [0, 15 * MIB, 30 * MIB]
    assert allocator.reserved_bytes == 60 * MIB


def test_what_lies_before_unused_addresses_is_taken_last() -> None:
    """2 MiB are free at the end of what is mapped, and 4 MiB at its beginning: the smaller could grow."""
    allocator = CachingAllocator(expandable=True)
    first, _ = allocator.malloc(4 * MIB), allocator.malloc(14 * MIB)
    allocator.free(first)
    assert allocator.malloc(3 * MIB // 2)[1] == 0


def test_pages_given_back_are_the_first_to_be_mapped_again() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(12 * MIB)[1] == 20 * MIB
    assert allocator.malloc(8 * MIB)[1] == 32 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_a_page_is_given_back_only_as_a_whole() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.malloc(num_mib * MIB) for num_mib in (10, 40, 10)]  # pages end at 20, 40, 60
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(30 * MIB)[1] == 10 * MIB


def test_expandable_segments_that_touch_do_not_grow_into_each_other() -> None:
    pool = Pool(is_small=False, expandable=True)
    pool.segments.update({0: 60 * MIB, 60 * MIB: 60 * MIB})
    pool.free.put([(20 * MIB, 40 * MIB)])
    pool.unmapped.put([(20 * MIB, 20 * MIB), (60 * MIB, 60 * MIB)])
    assert len(pool.unmapped.in_order) == 2
    assert pool.room_bytes((20 * MIB, 40 * MIB)) == 20 * MIB
    assert pool.start_of_room(40 * MIB) == 20 * MIB
    assert pool.start_of_room(60 * MIB) == 60 * MIB


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    events = [Event(0, 16 * MIB), Event(0, FREE), Event(1, 30 * MIB)]
    assert [replay(events[:num]).reserved_bytes for num in (1, 2, 3)] == [16 * MIB, 16 * MIB, 46 * MIB]
    limited = replay(events, limit_bytes=40 * MIB)
    assert (limited.reserved_bytes, limited.num_retries, limited.oom) == (30 * MIB, 1, None)
    assert limited.reserved_peak_bytes == 30 * MIB


def test_the_peak_stays_when_memory_is_given_back() -> None:
    events = [Event(0, 38 * MIB), Event(0, FREE), Event(1, 20 * MIB, stream=1)]
    done = replay(events, limit_bytes=40 * MIB)
    assert (done.reserved_bytes, done.reserved_peak_bytes, done.allocated_peak_bytes) == (20 * MIB, *[38 * MIB] * 2)


@pytest.mark.parametrize("limit", ["limit_bytes", "device_bytes"])
@both
def test_where_memory_ran_out(expandable: bool, limit: str) -> None:
    events = [Event(0, 1000), Event(1, 20 * MIB), Event(2, 21 * MIB), Event(2, FREE)]
    done = replay(events, expandable=expandable, **{limit: 40 * MIB})
    assert done.oom == Oom(event=2, asked_bytes=21 * MIB, allocated_bytes=20 * MIB + 1024, reserved_bytes=22 * MIB)
    assert done.allocated_bytes == 20 * MIB + 1024
    assert done.num_retries == 1


def test_under_a_limit_expandable_segments_ask_for_more_than_they_need() -> None:
    """18.5 MiB are free at the end, 20 MiB more would do for 38: but the limit is compared with 38 more."""
    events = [Event(0, 3 * MIB // 2), Event(1, 38 * MIB)]
    assert replay(events, expandable=True).reserved_peak_bytes == 40 * MIB
    assert replay(events, expandable=True, device_bytes=40 * MIB).oom is None
    assert replay(events, expandable=True, device_bytes=40 * MIB - 1).oom is not None
    assert replay(events, expandable=True, limit_bytes=40 * MIB).oom is not None
    assert needs_of(events, expandable=True).least_limit_bytes == 58 * MIB
    assert needs_of(events).least_limit_bytes == 58 * MIB


def test_the_least_limit_is_less_than_what_is_reserved_without_one() -> None:
    events = [Event(0, 16 * MIB), Event(0, FREE), Event(1, 30 * MIB), Event(1, FREE), Event(2, 44 * MIB)]
    assert replay(events).reserved_peak_bytes == 90 * MIB
    assert needs_of(events).least_limit_bytes == 44 * MIB


def test_nothing_takes_nothing() -> None:
    assert needs_of([]).least_limit_bytes == 0
    assert replay([Event(0, 0), Event(0, 0)]).reserved_bytes == 0  # nothing is asked for a tensor of no bytes


def test_what_was_never_born_cannot_die() -> None:
    with pytest.raises(KeyError):
        replay([Event(7, FREE)])


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    events, was_enabled = [Event(0, 16 * MIB)], gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        needs_of(events)
        assert gc.isenabled() is is_enabled
        with pytest.raises(KeyError):
            needs_of([*events, Event(1, FREE)])
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_further_steps_hand_on_what_the_last_one_left() -> None:
    """A batch (2, then 4) outlives its step; temporaries (1, 3) don't. Each step's allocations have their own names."""
    events = [(0, 100, 0), (1, 50, 0), (2, 10, 0), (1, FREE, 0), (3, 50, 0), (4, 10, 0), (2, FREE, 0), (3, FREE, 0)]
    more = further_steps(events, 4, 2)
    assert [size for _, size, _ in more] == 2 * [50, 10, FREE, FREE]
    assert [name for name, _, _ in more if name in (4, 2)] == [4]
    found = replay([*events, *more])
    assert found.allocated_bytes == replay(events).allocated_bytes
    assert found.allocated_peak_bytes == replay(events).allocated_peak_bytes


def test_steps_that_differ_are_not_repeated() -> None:
    assert further_steps([(0, 10, 0), (1, 20, 0), (0, FREE, 0)], 1, 3) == []
