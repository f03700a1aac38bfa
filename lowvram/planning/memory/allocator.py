"""Simulates torch's CUDA caching allocator without CUDA: what it would reserve for a sequence of allocations.

After c10/cuda/CUDACachingAllocator.cpp (class DeviceCachingAllocator) and c10/core/AllocatorConfig.h of
github.com/pytorch/pytorch. The rules are the same in the .cpp before and after pull request 172056 (January 2026, which
made the size of large segments a setting). The constants are in a header that torch 2.13.0 installs. docs/results has
recordings of what the real allocator did in some training steps, and a test compares this one with them byte by byte
(scripts/benchmarks/recorded.py): so far recordings of the emulated device (tests/emulated_cuda).

It simulates the default settings: max_split_size unlimited, no roundup_power2_divisions, no garbage collection, no
private pools (of CUDA graphs). Expandable segments are on from the start or never. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from lowvram.planning.memory.segments import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    Block,
    Pool,
    Pools,
    rounded_up,
    segment_bytes,
)

UNLIMITED_BYTES = 2**60


class OutOfMemory(Exception):
    """The allocator found no memory, even after it freed its cache."""


class CachingAllocator:
    """The state of the allocator of one device.

    Args:
        expandable: PYTORCH_ALLOC_CONF=expandable_segments:True.
        limit_bytes: what `torch.cuda.set_per_process_memory_fraction` allows; None: unlimited. As in torch it is
            compared with the reserved bytes plus the segment that an allocation would get, although an expandable
            segment may need fewer or more pages.
        device_bytes: the device's memory for this allocator; None: unlimited.
        address_of: returns the address of the next segment, given its size. Addresses decide between free blocks of
            equal size.
        frees_cache: at the limit, free the cache and try again, as torch does. False: raise at once and leave the state
            unchanged.
    """

    def __init__(
        self,
        expandable: bool = False,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        address_of: Callable[[int], int] | None = None,
        frees_cache: bool = True,
    ) -> None:
        self.expandable = expandable
        self.limit_bytes = UNLIMITED_BYTES if limit_bytes is None else limit_bytes
        self.device_bytes = UNLIMITED_BYTES if device_bytes is None else device_bytes
        self.address_of = address_of
        self.frees_cache = frees_cache
        self.large = Pools(is_small=False, expandable=expandable)
        self.small = Pools(is_small=True, expandable=expandable)
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        # Any limit from `granted_bytes` on and below `refused_bytes` would have led to the same state.
        self.granted_bytes, self.refused_bytes = 0, UNLIMITED_BYTES
        self.num_retries = 0
        self._next_address = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes`, which are more than 0.

        Raises:
            OutOfMemory: there is no room under the limit.
        """
        num_bytes = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES  # in a hot loop, so `rounded_up` isn't called
        pool = (self.small if num_bytes <= SMALL_BYTES else self.large)[stream]
        if pool.freed:
            pool.settle()
        order = pool.free.in_order
        # Best fit: the smallest free block that is large enough; among equal ones, that with the lowest address.
        index = bisect_left(order, (num_bytes,))
        if index == len(order):
            if not self._grow(pool, num_bytes):
                self._retry(pool, num_bytes)
            index = len(order) - 1  # the new memory is the largest free block
        elif self.expandable:
            index = pool.least_room(index)
        block = pool.free.cut(index, num_bytes, pool.least_rest_bytes)
        self.allocated_bytes += block[0]
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        return block

    def free(self, block: Block, stream: int = 0) -> None:
        """Free a block, which its stream can use again at once.

        Args:
            stream: the stream of the block's `malloc`.
        """
        self.allocated_bytes -= block[0]
        self.complete_free(block, stream)

    def request_free(self, block: Block) -> None:
        """Count a block as freed, but not as available: another stream may still use it (`Tensor.record_stream`)."""
        self.allocated_bytes -= block[0]

    def complete_free(self, block: Block, stream: int = 0) -> None:
        """Make a block available again."""
        (self.small if block[0] <= SMALL_BYTES else self.large)[stream].freed.append(block)

    def empty_cache(self) -> None:
        """Return all free segments to the device, and the free pages of expandable segments."""
        for pool in self.pools():
            for free in pool.free.in_order.copy():
                if self.expandable:
                    self._unmap(pool, free)
                elif pool.is_segment(free):
                    pool.free.take(free)
                    self.reserved_bytes -= pool.segments.pop(free[1])

    def kept_bytes(self) -> int:
        """The bytes that `empty_cache` would return to the device."""
        if self.expandable:
            pages = (pool.pages(free) for pool in self.pools() for free in pool.free.in_order)
            return sum(end - begin for begin, end in pages)
        return sum(free[0] for pool in self.pools() for free in pool.free.in_order if pool.is_segment(free))

    def pools(self) -> list[Pool]:
        """All pools, settled; large ones first."""
        pools = [*self.large.values(), *self.small.values()]
        for pool in pools:
            pool.settle()
        return pools

    def copied(self, limit_bytes: int | None) -> CachingAllocator:
        """A copy with another limit; only valid if neither limit would have changed the state so far. Blocks of this
        allocator can be freed in the copy."""
        other = CachingAllocator(self.expandable, limit_bytes, self.device_bytes)
        other.allocated_bytes, other.allocated_peak_bytes = self.allocated_bytes, self.allocated_peak_bytes
        other.reserved_bytes, other.reserved_peak_bytes = self.reserved_bytes, self.reserved_peak_bytes
        other.granted_bytes, other._next_address = self.granted_bytes, self._next_address
        other.large, other.small = self.large.copied(), self.small.copied()
        return other

    def next_address(self, num_bytes: int) -> int:
        """The address of a new segment: after all others, aligned as segments are."""
        address = self._next_address
        self._next_address += rounded_up(num_bytes, LARGE_SEGMENT_BYTES)
        return address

    def _grow(self, pool: Pool, num_bytes: int) -> bool:
        """Get new memory from the device as a free block of the pool; False if the limit or the device refuses."""
        new_bytes = segment_bytes(num_bytes)
        asked_bytes = self.reserved_bytes + new_bytes
        if asked_bytes > self.limit_bytes:
            self.refused_bytes = min(self.refused_bytes, asked_bytes)
            return False
        self.granted_bytes = max(self.granted_bytes, asked_bytes)
        if self.expandable:
            return self._expand(pool, num_bytes)
        if self.reserved_bytes + new_bytes > self.device_bytes:
            return False
        self._reserve(new_bytes)
        pool.free.append((new_bytes, self._new_segment(pool, new_bytes)))
        return True

    def _retry(self, pool: Pool, num_bytes: int) -> None:
        """Free the cache and try again to get new memory. Raises OutOfMemory if that isn't enough."""
        if not self.frees_cache:  # with a limit below this, even freeing the cache wouldn't be enough
            self.refused_bytes = self.reserved_bytes - self.kept_bytes() + segment_bytes(num_bytes)
            raise OutOfMemory
        self.num_retries += 1
        self.empty_cache()
        if not self._grow(pool, num_bytes):
            raise OutOfMemory

    def _new_segment(self, pool: Pool, num_bytes: int) -> int:
        address = (self.address_of or self.next_address)(num_bytes)
        pool.segments[address] = num_bytes
        return address

    def _expand(self, pool: Pool, num_bytes: int) -> bool:
        """Map pages of an expandable segment until a free block is large enough. Pages mapped before a failure stay."""
        start = pool.start_of_room(num_bytes)
        if start is None:  # a segment has address space for the whole device and an eighth more
            room_bytes = rounded_up(self.device_bytes + self.device_bytes // 8, pool.page_bytes)
            start = self._new_segment(pool, room_bytes)
            pool.unmapped.put([(room_bytes, start)])
        while (free_bytes := pool.free.beginning.get(start, (0,))[0]) < num_bytes:
            if not self._map(pool, start + free_bytes, num_bytes - free_bytes):
                return False
        return True

    def _map(self, pool: Pool, address: int, num_bytes: int) -> bool:
        """Map whole pages at the beginning of an unmapped block, or all of it; False if the device has too little
        memory."""
        unmapped_bytes, _ = unmapped = pool.unmapped.beginning[address]
        mapped_bytes = rounded_up(min(num_bytes, unmapped_bytes), pool.page_bytes)
        if self.reserved_bytes + mapped_bytes > self.device_bytes:
            return False
        pool.unmapped.take(unmapped)
        if mapped_bytes < unmapped_bytes:
            pool.unmapped.put([(unmapped_bytes - mapped_bytes, address + mapped_bytes)])
        pool.free.put([(mapped_bytes, address)])
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, pool: Pool, free: Block) -> None:
        """Unmap the whole pages of a free block."""
        begin, end = pool.pages(free)
        if begin == end:
            return
        num_bytes, address = free
        pool.free.take(free)
        if begin > address:
            pool.free.put([(begin - address, address)])
        if end < address + num_bytes:
            pool.free.put([(address + num_bytes - end, end)])
        self.reserved_bytes -= end - begin
        [unmapped] = pool.unmapped.put([(end - begin, begin)])
        if pool.is_segment(unmapped):
            pool.unmapped.take(unmapped)
            del pool.segments[unmapped[1]]

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
