"""torch's CUDA caching allocator, replayed without CUDA: what it would reserve for a sequence of allocations.

After c10/cuda/CUDACachingAllocator.cpp (class DeviceCachingAllocator) and c10/core/AllocatorConfig.h of
github.com/pytorch/pytorch. The rules were read in two states of the .cpp, before and after pull request 172056 (January
2026, which made the size of large segments a setting); they say the same. The constants stand in the header that torch
2.13.0 installs. docs/results holds what the allocators of real devices did, where it was recorded, and a test replays
that to the byte (lowvram/planner/recorded.py).

As it comes, that is: max_split_size unlimited, no roundup_power2_divisions, no garbage collection, no private pools (of
CUDA graphs). Expandable segments are on from the start or never. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from lowvram.planner.blocks import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    Block,
    Entry,
    Pool,
    copied,
    rounded_up,
    segment_bytes,
)

UNLIMITED_BYTES = 2**60


class OutOfMemory(Exception):
    """The allocator found no room, even after it gave back what it kept."""


class CachingAllocator:
    """The state of the allocator of one device.

    Args:
        expandable: PYTORCH_ALLOC_CONF=expandable_segments:True.
        limit_bytes: of `torch.cuda.set_per_process_memory_fraction`; it is compared with what is reserved and the
            segment that an allocation would get, even where an expandable segment needs fewer pages, or more.
        device_bytes: of the device's memory, for this allocator; None: more than is ever asked for.
        address_of: gives the address of the next segment, from its bytes of address space. It decides between free
            blocks of equal size.
        gives_back: where there is no room under the limit, it gives back what it keeps and tries again, as it should;
            else it gives up before it has changed anything.
    """

    def __init__(
        self,
        expandable: bool = False,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        address_of: Callable[[int], int] | None = None,
        gives_back: bool = True,
    ) -> None:
        self.expandable = expandable
        self.limit_bytes = UNLIMITED_BYTES if limit_bytes is None else limit_bytes
        self.device_bytes = UNLIMITED_BYTES if device_bytes is None else device_bytes
        self.address_of = self.next_address if address_of is None else address_of
        self.gives_back = gives_back
        self.pools: dict[tuple[bool, int], Pool] = {}  # by (whether it is small, stream)
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.granted_bytes, self.refused_bytes = 0, UNLIMITED_BYTES  # with any limit between them all goes the same way
        self.num_retries = 0
        self._next_address = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes`, which are more than 0.

        Raises:
            OutOfMemory: there is no room under the limit.
        """
        num_bytes = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES  # in a hot loop, so `rounded_up` isn't called
        is_small = num_bytes <= SMALL_BYTES
        pool = self.pools.get((is_small, stream)) or self.pools.setdefault((is_small, stream), Pool(is_small))
        free = pool.free
        index = bisect_left(free, (num_bytes,))  # best fit: the smallest that is large enough, the lowest of several
        if index < len(free):
            block = free.pop(self._least_room(free, index) if self.expandable else index)[2]
        else:
            block = self._grow(pool, num_bytes) or self._retry(pool, num_bytes)
        rest_bytes = block.num_bytes - num_bytes
        if rest_bytes > SMALL_BYTES or (rest_bytes and (is_small or self.expandable)):
            rest = block.cut(num_bytes)
            insort(free, (rest_bytes, rest.address, rest))
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.num_bytes
        block.is_free = True
        block.pool.settle(block)

    def request_free(self, block: Block) -> None:
        """From here on it doesn't count as allocated, but another stream may still use it (`Tensor.record_stream`)."""
        self.allocated_bytes -= block.num_bytes

    def complete_free(self, block: Block) -> None:
        """From here on it can be had again."""
        block.is_free = True
        block.pool.settle(block)

    def empty_cache(self) -> None:
        """Give back segments that are wholly free; of expandable ones, pages that are."""
        for key in sorted(self.pools):  # large ones first
            pool = self.pools[key]
            for *_, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.is_alone():
                    pool.take(block)
                    self.reserved_bytes -= block.num_bytes

    def kept_bytes(self) -> int:
        """What `empty_cache` would give back."""
        free = [block for pool in self.pools.values() for *_, block in pool.free]
        if self.expandable:
            return sum(end - begin for begin, end in map(pages_of, free))
        return sum(block.num_bytes for block in free if block.is_alone())

    def dissolve(self, living: Iterable[Block]) -> None:
        """End here, and forget all blocks. They hold each other: left to it, the garbage collector would take longer.

        Args:
            living: all blocks that aren't free.
        """
        free = (entry[-1] for pool in self.pools.values() for entry in (*pool.free, *pool.unmapped))
        for block in (*living, *free):
            block.before = block.after = None
        for pool in self.pools.values():
            pool.free.clear()
            pool.unmapped.clear()

    def copied(self, limit_bytes: int | None, living: Iterable[Block]) -> tuple[CachingAllocator, list[Block]]:
        """An allocator in the same state, which no limit has shaped so far, and its blocks for those that live."""
        other = CachingAllocator(self.expandable, limit_bytes, self.device_bytes)
        other.allocated_bytes, other.allocated_peak_bytes = self.allocated_bytes, self.allocated_peak_bytes
        other.reserved_bytes, other.reserved_peak_bytes = self.reserved_bytes, self.reserved_peak_bytes
        other.granted_bytes, other._next_address = self.granted_bytes, self._next_address
        other.pools, blocks = copied(self.pools, living)
        return other, blocks

    def next_address(self, num_bytes: int) -> int:
        """Behind all others, and aligned as every segment is."""
        address = self._next_address
        self._next_address += rounded_up(num_bytes, LARGE_SEGMENT_BYTES)
        return address

    def _least_room(self, free: list[Entry], index: int) -> int:
        """Of a free block. One at the end of an expandable segment counts with all that it can grow to, so that those
        behind it in the list are preferred."""
        while index + 1 < len(free) and free[index + 1][2].room_bytes() < free[index][2].room_bytes():
            index += 1
        return index

    def _grow(self, pool: Pool, num_bytes: int) -> Block | None:
        """A block of memory that is new; None if there is none left."""
        new_bytes = segment_bytes(num_bytes)
        asked_bytes = self.reserved_bytes + new_bytes
        if asked_bytes > self.limit_bytes:
            self.refused_bytes = min(self.refused_bytes, asked_bytes)
            return None
        self.granted_bytes = max(self.granted_bytes, asked_bytes)
        if self.expandable:
            return self._expand(pool, num_bytes)
        if self.reserved_bytes + new_bytes > self.device_bytes:
            return None
        self._reserve(new_bytes)
        address = self.address_of(new_bytes)
        return Block(pool, address, new_bytes, start=address)

    def _retry(self, pool: Pool, num_bytes: int) -> Block:
        if not self.gives_back:  # even if it did, below this there would be no room
            self.refused_bytes = self.reserved_bytes - self.kept_bytes() + segment_bytes(num_bytes)
            raise OutOfMemory
        self.num_retries += 1
        self.empty_cache()
        block = self._grow(pool, num_bytes)
        if block is None:
            raise OutOfMemory
        return block

    def _expand(self, pool: Pool, num_bytes: int) -> Block | None:
        """Put memory behind addresses until a block is large enough. What was mapped on the way to a failure stays."""
        block = self._find_room(pool, num_bytes)
        if not block.is_mapped and not self._map(block, min(block.num_bytes, num_bytes)):
            return None
        while block.num_bytes < num_bytes:
            after = block.after
            assert after is not None  # else `_find_room` had chosen another
            if not self._map(after, min(num_bytes - block.num_bytes, after.num_bytes)):
                return None
            block = after  # which took the one before it in
        pool.take(block)
        return block

    def _find_room(self, pool: Pool, num_bytes: int) -> Block:
        """The lowest block, free or unmapped, that begins enough addresses which nothing uses."""
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and block.before.is_free else block
            room_bytes, last = 0, first
            while room_bytes < num_bytes and last is not None and last.is_free:
                room_bytes, last = room_bytes + last.num_bytes, last.after
            if room_bytes >= num_bytes:
                return first
        # An expandable segment has addresses for the whole device and an eighth more.
        room_bytes = rounded_up(self.device_bytes + self.device_bytes // 8, pool.page_bytes)
        address = self.address_of(room_bytes)
        block = Block(pool, address, room_bytes, start=address, is_mapped=False)
        pool.put(block)
        return block

    def _map(self, block: Block, num_bytes: int) -> bool:
        """Put whole pages of memory behind the first bytes of an unmapped block, which begins with a page."""
        pool = block.pool
        mapped_bytes = rounded_up(num_bytes, pool.page_bytes)
        if self.reserved_bytes + mapped_bytes > self.device_bytes:
            return False
        pool.take(block)
        if mapped_bytes < block.num_bytes:
            pool.put(block.cut(mapped_bytes))
        block.is_mapped = True
        pool.settle(block)
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory of a free block's whole pages away."""
        pool = block.pool
        begin, end = pages_of(block)
        if begin == end:
            return
        pool.take(block)
        pages = block
        if begin > block.address:
            pages = block.cut(begin - block.address)
            pool.put(block)
        if end - begin < pages.num_bytes:
            pool.put(pages.cut(end - begin))
        pages.is_mapped = False
        pool.settle(pages)
        self.reserved_bytes -= end - begin
        if pages.is_alone():
            pool.take(pages)

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)


def pages_of(block: Block) -> tuple[int, int]:
    """The addresses of the first of its whole pages, and behind the last: the same where it has none."""
    page_bytes = block.pool.page_bytes
    begin = block.start + rounded_up(block.address - block.start, page_bytes)
    end = block.start + (block.address + block.num_bytes - block.start) // page_bytes * page_bytes
    return begin, max(begin, end)
