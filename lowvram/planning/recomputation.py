"""Which blocks to recompute so that a step fits: the fewest, by dynamic programming over the blocks of a trace.

What a block keeps for its backward pass lives from its forward to its backward pass. If the block is recomputed, most
of it is missing in between: while later blocks run, and at the loss. So while a block runs, in either direction, it
only matters which blocks before it are recomputed; at the loss all blocks matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from lowvram.planning.trace.events import PHASES, Phase, Trace

FORWARD, BACKWARD = PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD)


class BlockMemory(NamedTuple):
    """The memory of a step around one block, if no block before it is recomputed."""

    freed_bytes: int  # by its recomputation, between its forward and its backward pass
    peak_bytes: int  # while it runs, in either direction, if it isn't recomputed
    again_bytes: int  # the same if it is


@final
@dataclass(frozen=True)
class StepMemory:
    """The memory of a step by block, in the order of the forward pass."""

    blocks: Sequence[BlockMemory]
    loss_bytes: int  # the peak between the forward and the backward pass of the last block


class Choice(NamedTuple):
    """Some of the blocks that have been looked at, and the bytes that their recomputation frees."""

    blocks: tuple[int, ...]
    freed_bytes: int


def fewest_blocks(memory: StepMemory, budget_bytes: float) -> tuple[int, ...] | None:
    """The fewest blocks whose recomputation keeps a step within a budget, by their numbers; None if none do. Of as
    many, those that free the most."""
    choices = [Choice((), 0)]
    for number, block in enumerate(memory.blocks):
        without = [each for each in choices if block.peak_bytes - each.freed_bytes <= budget_bytes]
        with_it = [each for each in choices if block.again_bytes - each.freed_bytes <= budget_bytes]
        more = [Choice((*each.blocks, number), each.freed_bytes + block.freed_bytes) for each in with_it]
        choices = worthwhile([*without, *more])
    return next((each.blocks for each in choices if memory.loss_bytes - each.freed_bytes <= budget_bytes), None)


def best_blocks(memory: StepMemory) -> list[tuple[int, ...]]:
    """For each number of blocks worth recomputing those with the lowest peak, from none on."""
    by_number: dict[int, tuple[int, ...]] = {0: ()}
    blocks: tuple[int, ...] | None = ()
    while blocks is not None:
        by_number[len(blocks)] = blocks
        blocks = fewest_blocks(memory, peak_with(memory, blocks) - 1)
    return list(by_number.values())


def peak_with(memory: StepMemory, chosen: Sequence[int]) -> int:
    """The peak of a step that recomputes these blocks."""
    freed, peak = 0, 0
    for number, block in enumerate(memory.blocks):
        peak = max(peak, (block.again_bytes if number in chosen else block.peak_bytes) - freed)
        freed += block.freed_bytes if number in chosen else 0
    return max(peak, memory.loss_bytes - freed)


def worthwhile(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that free more than all others of no more blocks, the fewest blocks first."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (len(each.blocks), -each.freed_bytes)):
        if not best or choice.freed_bytes > best[-1].freed_bytes:
            best.append(choice)
    return best


def step_memory(plain: Trace, recomputed: Trace, blocks: Sequence[str]) -> StepMemory:
    """The memory of a step by block, from two traces; of several parts the last one counts.

    Args:
        plain: of the step that recomputes no block.
        recomputed: of the same step, if it recomputes all.
        blocks: their names, in the order of the forward pass.
    """
    before, after = Pass(plain, blocks), Pass(recomputed, blocks)
    freed = (before.kept_bytes - after.kept_bytes).clamp(min=0)
    freed_before = (freed.cumsum(0) - freed).tolist()  # by the blocks before each, all of which `recomputed` recomputes
    peaks, again = before.peaks(before.kept_until()), after.peaks(after.made_again_from())
    memory = [
        BlockMemory(of_block, peak, peak_again + more)
        for of_block, peak, peak_again, more in zip(freed.tolist(), peaks, again, freed_before, strict=True)
    ]
    return StepMemory(memory, before.peak(before.last_birth(), before.kept_until()[-1]))


@final
class Pass:
    """The last forward and backward pass of a trace."""

    def __init__(self, trace: Trace, blocks: Sequence[str]) -> None:
        self.num_blocks = len(blocks)
        is_forward = trace.phases == FORWARD
        self.loss = int(is_forward.nonzero()[-1]) + 1  # the first event of the backward pass
        others = (~is_forward[: self.loss]).nonzero()
        self.start = int(others[-1]) + 1 if len(others) else 0
        after = (trace.phases[self.loss :] != BACKWARD).nonzero()
        self.end = self.loss + int(after[0]) if len(after) else len(trace.phases)
        self.total = trace.device_growth.cumsum(0)
        self.births, self.deaths = trace.lifetimes
        self.owners = torch.tensor([owner_of(trace.module_of(serial), blocks) for serial in range(len(trace.kinds))])
        self.is_forward = (self.births >= self.start) & (self.births < self.loss)
        self.is_backward = (self.births >= self.loss) & (self.births < self.end)
        is_kept = self.is_forward & (self.owners >= 0)
        sizes = torch.zeros(len(self.owners), dtype=torch.int64)
        sizes.scatter_add_(0, trace.storages[: self.loss], trace.device_growth[: self.loss])
        self.kept_bytes = torch.zeros(len(blocks), dtype=torch.int64)  # at the loss, by block
        self.kept_bytes.scatter_add_(0, self.owners[is_kept], sizes[is_kept])

    def peak(self, first: int, last: int) -> int:
        """The most bytes that are alive after one of these events."""
        return int(self.total[first : max(first, last) + 1].max())

    def peaks(self, begins: Sequence[int]) -> list[int]:
        """The most bytes that are alive while each block runs, in either direction.

        Args:
            begins: the first event of the backward pass of each block.
        """
        ends = [self.end - 1, *begins[:-1]]
        backward = [self.peak(begin, end) for begin, end in zip(begins, ends, strict=True)]
        forward = [self.forward_peak(number) for number in range(self.num_blocks)]
        return [max(pair) for pair in zip(forward, backward, strict=True)]

    def forward_peak(self, block: int) -> int:
        births = self.births[self.is_forward & (self.owners == block)]
        return self.peak(int(births.min()), int(births.max())) if len(births) else 0

    def last_birth(self) -> int:
        """The last event of the forward passes of the blocks."""
        births = self.births[self.is_forward & (self.owners >= 0)]
        return int(births.max()) if len(births) else self.start

    def kept_until(self) -> list[int]:
        """For each block the event at which its backward pass begins, if it isn't recomputed: what the block after it
        has kept is gone by then; of what the last block has kept, the first is gone."""
        deaths = [
            self.deaths[self.is_forward & (self.owners == number) & (self.deaths >= self.loss)].clamp(max=self.end - 1)
            for number in range(self.num_blocks)
        ]
        begins = [int(deaths[-1].min()) if len(deaths[-1]) else self.loss]
        for after in reversed(deaths[1:]):
            begins.append(max(begins[-1], int(after.max())) if len(after) else begins[-1])
        return begins[::-1]

    def made_again_from(self) -> list[int]:
        """The same for recomputed blocks: there the first of their tensors is made again."""
        begins = [self.loss]
        for number in reversed(range(self.num_blocks)):
            births = self.births[self.is_backward & (self.owners == number)]
            begins.append(int(births.min()) if len(births) else begins[-1])
        return begins[:0:-1]


def owner_of(module: str, blocks: Sequence[str]) -> int:
    """The number of the block to which a module belongs; -1 if it belongs to none."""
    return next((number for number, name in enumerate(blocks) if f"{module}.".startswith(f"{name}.")), -1)
