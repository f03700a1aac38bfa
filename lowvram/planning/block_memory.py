"""What each block of a traced step keeps, and how long it takes: for the choice of the blocks to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from lowvram.planning.recomputation import Block, StepMemory
from lowvram.planning.time.op_cost import Column
from lowvram.planning.time.roofline import Rates, operators_s
from lowvram.planning.trace.events import PHASES, Phase, Trace

FORWARD, BACKWARD = PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD)
COST_UNITS = 1000  # the costs of all blocks together: whole numbers, so that blocks that are alike cost the same


def step_memory(plain: Trace, recomputed: Trace, blocks: Sequence[str], rates: Rates) -> StepMemory:
    """The memory of a step by block, from two traces; of several parts the last one counts.

    Args:
        plain: of the step that recomputes no block.
        recomputed: of the same step, if it recomputes all.
        blocks: their names, in the order of the forward pass.
        rates: of the device.
    """
    before, after = Pass(plain, blocks), Pass(recomputed, blocks)
    freed = (before.kept_bytes - after.kept_bytes).clamp(min=0)
    freed_before = (freed.cumsum(0) - freed).tolist()  # by the blocks before each, all of which `recomputed` recomputes
    peaks, again = before.peaks(before.kept_until()), after.peaks(after.made_again_from())
    columns = (costs(plain, blocks, rates), freed.tolist(), peaks, again, freed_before)
    memory = [
        Block(cost, of_block, peak, peak_again + more)
        for cost, of_block, peak, peak_again, more in zip(*columns, strict=True)
    ]
    return StepMemory(memory, before.peak(before.last_birth(), before.kept_until()[-1]))


def costs(trace: Trace, blocks: Sequence[str], rates: Rates) -> list[int]:
    """The time of each block's forward pass; the same for all if a rate isn't known."""
    work = trace.work[trace.work[:, Column.PHASE] == FORWARD]
    owners = torch.tensor([*(owner_of(name, blocks) for name in trace.modules), -1])[work[:, Column.MODULE]]
    taken_s = operators_s(work, rates)[owners >= 0]
    by_block = torch.zeros(len(blocks), dtype=torch.float64).scatter_add_(0, owners[owners >= 0], taken_s)
    if by_block.isnan().any() or not by_block.sum():
        return [1] * len(blocks)
    return (by_block * (COST_UNITS / by_block.sum())).round().clamp(min=1).long().tolist()


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
