"""What torch's CUDA caching allocator deals with: segments cut into blocks, and pools of those that can be had.
Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
# c10/core/AllocatorConfig.h, by the names there
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_BYTES = MIB  # kSmallSize: the largest allocation of a small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a small pool's segments, and its pages in expandable ones
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_: the same of a large pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on an allocation gets a segment of its own size,
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: rounded up to a multiple of this


class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) addresses with no memory behind them."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "num_bytes", "pool", "start")

    def __init__(self, pool: Pool, address: int, num_bytes: int, start: int, is_mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.num_bytes = num_bytes
        self.start = start  # of the segment, from which an expandable one counts its pages
        self.is_mapped = is_mapped
        self.is_free = True
        self.before: Block | None = None  # its neighbours in the segment
        self.after: Block | None = None

    def cut(self, num_bytes: int) -> Block:
        """Keep the first bytes; the rest becomes a block of its own."""
        rest = Block(self.pool, self.address + num_bytes, self.num_bytes - num_bytes, self.start, self.is_mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.num_bytes = num_bytes
        return rest

    def room_bytes(self) -> int:
        """Its size if it grew over the addresses behind it."""
        after = self.after
        return self.num_bytes + (after.num_bytes if after is not None and not after.is_mapped else 0)

    def is_alone(self) -> bool:
        return self.before is None and self.after is None


class Pool:
    """The blocks of one stream that can be had: up to 1 MiB, or above."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.free: list[tuple[int, int, Block]] = []  # by (bytes, address)
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def put(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, (block.num_bytes, block.address, block))  # no two are equal: blocks are never compared
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.num_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def absorb(self, block: Block, neighbour: Block | None) -> None:
        """Let `block`, which is in no list, grow over a neighbour that is free and of its kind."""
        if neighbour is None or not neighbour.is_free or neighbour.is_mapped != block.is_mapped:
            return
        self.take(neighbour)
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.num_bytes += neighbour.num_bytes

    def settle(self, block: Block) -> None:
        """Join `block` with its free neighbours and keep it."""
        self.absorb(block, block.before)
        self.absorb(block, block.after)
        self.put(block)


def rounded_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def segment_bytes(num_bytes: int) -> int:
    """Of the segment that would be made for an allocation of so many bytes (get_allocation_size)."""
    if num_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if num_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded_up(num_bytes, ROUND_LARGE_BYTES)
