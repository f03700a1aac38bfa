"""The segments of torch's CUDA caching allocator and their free blocks, in pools. Imports no torch.

Blocks are plain tuples of numbers, so that a replay is fast, fast to copy, and makes no work for the garbage collector.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

MIB = 2**20
# c10/core/AllocatorConfig.h, by the names there
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_BYTES = MIB  # kSmallSize: the largest allocation of a small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a small pool's segments, or pages of its expandable segments
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_: the same of a large pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on an allocation gets a segment of its own size,
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: rounded up to a multiple of this

Block = tuple[int, int]  # bytes and first address, so that tuples sort in the order of best fit
Segments = dict[int, int]  # bytes, by the first address


@final
@dataclass(eq=False)
class BlockSet:
    """The free blocks of a pool, or its unmapped ones. Neighbours in the same segment are merged."""

    segments: Segments
    in_order: list[Block] = field(default_factory=list)  # sorted by bytes, then address
    beginning: dict[int, Block] = field(default_factory=dict)  # by the first address
    ending: dict[int, Block] = field(default_factory=dict)  # by the address behind the last

    def put(self, blocks: Iterable[Block]) -> Iterable[Block]:
        """Add blocks, merged with their neighbours; returns the merged blocks."""
        order, beginning, ending = self.in_order, self.beginning, self.ending
        joined: dict[int, Block] = {}  # by address; sorted into `in_order` last, since many are merged again
        for num_bytes, address in blocks:
            end = address + num_bytes
            after, before = beginning.get(end), ending.get(address)
            if after is not None and end not in self.segments:
                del beginning[end]
                if joined.pop(end, None) is None:
                    del order[bisect_left(order, after)]
                end += after[0]
            if before is not None and address not in self.segments:
                del ending[address]
                address = before[1]
                if joined.pop(address, None) is None:
                    del order[bisect_left(order, before)]
            beginning[address] = ending[end] = joined[address] = end - address, address
        for block in joined.values():
            insort(order, block)
        return joined.values()

    def append(self, block: Block) -> None:
        """Add a block that is larger than all others, and is a segment of its own."""
        num_bytes, address = block
        self.in_order.append(block)
        self.beginning[address] = self.ending[address + num_bytes] = block

    def cut(self, index: int, num_bytes: int, least_rest_bytes: int) -> Block:
        """Remove and return the first `num_bytes` of the block `in_order[index]`; the whole block if fewer than
        `least_rest_bytes` would be left."""
        order, beginning, ending = self.in_order, self.beginning, self.ending
        block = all_bytes, address = order[index]
        rest_bytes, rest_address = all_bytes - num_bytes, address + num_bytes
        del beginning[address]
        if rest_bytes < least_rest_bytes:
            del order[index], ending[address + all_bytes]
            return block
        beginning[rest_address] = ending[address + all_bytes] = rest = rest_bytes, rest_address
        if index == 0 or order[index - 1] < rest:  # the usual case, which is faster
            order[index] = rest
        else:
            del order[index]
            insort(order, rest)
        return num_bytes, address

    def take(self, block: Block) -> None:
        """Remove a block."""
        num_bytes, address = block
        del self.in_order[bisect_left(self.in_order, block)]
        del self.beginning[address], self.ending[address + num_bytes]

    def after(self, end: int) -> Block | None:
        """The block that begins at address `end`, unless a segment begins there."""
        return None if end in self.segments else self.beginning.get(end)

    def before(self, address: int) -> Block | None:
        """The block that ends at `address`, unless a segment begins there."""
        return None if address in self.segments else self.ending.get(address)

    def copied(self, segments: Segments) -> BlockSet:
        return BlockSet(segments, self.in_order.copy(), self.beginning.copy(), self.ending.copy())


class Pool:
    """The segments of one stream for blocks of up to 1 MiB (`is_small`), or for larger ones."""

    def __init__(self, is_small: bool, expandable: bool) -> None:
        self.is_small, self.expandable = is_small, expandable
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        # A free block is split if at least this much would be left.
        self.least_rest_bytes = MIN_BLOCK_BYTES if is_small or expandable else SMALL_BYTES + 1
        self.segments: Segments = {}
        self.free = BlockSet(self.segments)
        self.freed: list[Block] = []  # not yet merged into `free`
        self.unmapped = BlockSet(self.segments)  # address ranges of expandable segments without memory

    def settle(self) -> None:
        """Merge freed blocks into `free`. Called only before the next allocation: neighbours are often freed one after
        another, and merging them together is faster."""
        self.free.put(self.freed)
        self.freed.clear()

    def copied(self) -> Pool:
        other = Pool(self.is_small, self.expandable)  # not copy.copy(): attributes of its result are slower to read
        other.segments = self.segments.copy()
        other.free, other.unmapped = self.free.copied(other.segments), self.unmapped.copied(other.segments)
        other.freed = self.freed.copy()
        return other

    def is_segment(self, block: Block) -> bool:
        """Whether a block is a whole segment."""
        num_bytes, address = block
        return self.segments.get(address) == num_bytes

    def pages(self, free: Block) -> tuple[int, int]:
        """The addresses at which a free block's whole pages begin and end; equal if it has none."""
        num_bytes, address = free
        start = max(start for start in self.segments if start <= address)  # its segment's, where pages begin
        begin = start + rounded_up(address - start, self.page_bytes)
        end = start + (address + num_bytes - start) // self.page_bytes * self.page_bytes
        return begin, max(begin, end)

    def room_bytes(self, free: Block) -> int:
        """The size that a free block could grow to, by mapping the addresses after it."""
        num_bytes, address = free
        unmapped = self.unmapped.after(address + num_bytes)
        return num_bytes if unmapped is None else num_bytes + unmapped[0]

    def least_room(self, index: int) -> int:
        """The index of the free block to use, from `index` on: the one with the least `room_bytes`, so that a block at
        the growing end of an expandable segment is kept for larger allocations."""
        order = self.free.in_order
        room_bytes = self.room_bytes(order[index])
        while room_bytes > order[index][0] and index + 1 < len(order):
            next_bytes = self.room_bytes(order[index + 1])
            if next_bytes >= room_bytes:
                break
            index, room_bytes = index + 1, next_bytes
        return index

    def start_of_room(self, num_bytes: int) -> int | None:
        """The lowest address at which a segment has `num_bytes` of unused addresses, at least some of them unmapped;
        None if there is none."""
        for address, (unmapped_bytes, _) in sorted(self.unmapped.beginning.items()):
            before = self.free.before(address)
            start, end = address if before is None else before[1], address + unmapped_bytes
            while block := self.free.after(end) or self.unmapped.after(end):
                end += block[0]
            if end - start >= num_bytes:
                return start
        return None


class Pools(dict[int, Pool]):
    """Pools by stream, each made when it is first used."""

    def __init__(self, is_small: bool, expandable: bool) -> None:
        self.is_small, self.expandable = is_small, expandable

    def __missing__(self, stream: int) -> Pool:
        self[stream] = Pool(self.is_small, self.expandable)
        return self[stream]

    def copied(self) -> Pools:
        other = Pools(self.is_small, self.expandable)
        other.update((stream, pool.copied()) for stream, pool in self.items())
        return other


def rounded_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def segment_bytes(num_bytes: int) -> int:
    """The size of a new segment for an allocation of `num_bytes` (torch's get_allocation_size)."""
    if num_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if num_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded_up(num_bytes, ROUND_LARGE_BYTES)
