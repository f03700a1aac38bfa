"""What torch's CUDA caching allocator deals with: segments cut into blocks, and pools of those that can be had.
Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import TypeVar

MIB = 2**20
# c10/core/AllocatorConfig.h, by the names there
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_BYTES = MIB  # kSmallSize: the largest allocation of a small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a small pool's segments, and its pages in expandable ones
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_: the same of a large pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on an allocation gets a segment of its own size,
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: rounded up to a multiple of this
Key = TypeVar("Key")


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
        after = self.after
        rest.before, rest.after = self, after
        if after is not None:
            after.before = rest
        self.after = rest
        self.num_bytes = num_bytes
        return rest

    def room_bytes(self) -> int:
        """Its size if it grew over the addresses behind it."""
        after = self.after
        return self.num_bytes + (after.num_bytes if after is not None and not after.is_mapped else 0)

    def is_alone(self) -> bool:
        return self.before is None and self.after is None


Entry = tuple[int, int, Block]  # bytes, address: no two are equal, so blocks are never compared


class Pool:
    """The blocks of one stream that can be had: up to 1 MiB, or above."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.free: list[Entry] = []  # in order
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def put(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, (block.num_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.num_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def settle(self, block: Block) -> None:
        """Join `block`, which is in no list, with neighbours that are free and of its kind, and keep it."""
        before, after, is_mapped = block.before, block.after, block.is_mapped
        if before is not None and before.is_free and before.is_mapped == is_mapped:
            self.take(before)
            block.address = before.address
            block.num_bytes += before.num_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free and after.is_mapped == is_mapped:
            self.take(after)
            block.num_bytes += after.num_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self.put(block)


def copied(pools: Mapping[Key, Pool], living: Iterable[Block]) -> tuple[dict[Key, Pool], list[Block]]:
    """Pools and blocks of their own in the same state.

    Args:
        living: all blocks that are in no pool. Their copies are returned, in the same order.
    """
    living = list(living)
    others = {key: Pool(pool.is_small) for key, pool in pools.items()}
    pool_of = {pools[key]: other for key, other in others.items()}
    free = [entry[-1] for pool in pools.values() for entry in [*pool.free, *pool.unmapped]]
    twins: dict[Block, Block] = {}
    for block in [*living, *free]:
        twin = Block(pool_of[block.pool], block.address, block.num_bytes, block.start, block.is_mapped)
        twin.is_free = block.is_free
        twins[block] = twin
    for block, twin in twins.items():
        if block.after is not None:
            twin.after = twins[block.after]
            twin.after.before = twin
    for pool, other in pool_of.items():
        other.free = [(num_bytes, address, twins[block]) for num_bytes, address, block in pool.free]
        other.unmapped = [(address, twins[block]) for address, block in pool.unmapped]
    return others, [twins[block] for block in living]


def rounded_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def segment_bytes(num_bytes: int) -> int:
    """Of the segment that would be made for an allocation of so many bytes (get_allocation_size)."""
    if num_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if num_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded_up(num_bytes, ROUND_LARGE_BYTES)
