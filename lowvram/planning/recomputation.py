"""Which blocks to recompute so that a step fits at the least cost of time: dynamic programming over the blocks.

What a block keeps for its backward pass lives from its forward to its backward pass. If the block is recomputed, most
of it is missing in between: while later blocks run, and at the loss. So while a block runs, in either direction, it
only matters which blocks before it are recomputed; at the loss all blocks matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

STEPS = 128  # into which the range of peaks is divided, so that models with many different blocks take no long search


class Block(NamedTuple):
    """What is known of a block, if no block before it is recomputed."""

    cost: int  # of its recomputation, a time in any unit
    freed_bytes: int  # by its recomputation, between its forward and its backward pass
    peak_bytes: int  # while it runs, in either direction, if it isn't recomputed
    again_bytes: int  # the same if it is


@final
@dataclass(frozen=True)
class StepMemory:
    """The memory of a step by block, in the order of the forward pass."""

    blocks: Sequence[Block]
    loss_bytes: int  # the peak between the forward and the backward pass of the last block


class Choice(NamedTuple):
    """Some of the blocks that have been looked at: what their recomputation costs and frees."""

    blocks: tuple[int, ...]
    cost: int
    freed_bytes: int


def cheapest_blocks(memory: StepMemory, budget_bytes: float) -> tuple[int, ...] | None:
    """The blocks whose recomputation keeps a step within a budget at the least cost, by their numbers; None if none do.
    Of those that cost the same, those that free the most."""
    choices = [Choice((), 0, 0)]
    for number, block in enumerate(memory.blocks):
        without = [each for each in choices if block.peak_bytes - each.freed_bytes <= budget_bytes]
        with_it = [
            Choice((*each.blocks, number), each.cost + block.cost, each.freed_bytes + block.freed_bytes)
            for each in choices
            if block.again_bytes - each.freed_bytes <= budget_bytes
        ]
        choices = worthwhile([*without, *with_it])
    return next((each.blocks for each in choices if memory.loss_bytes - each.freed_bytes <= budget_bytes), None)


def worthwhile(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that free more than all others of no higher cost, the cheapest first."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.cost, -each.freed_bytes)):
        if not best or choice.freed_bytes > best[-1].freed_bytes:
            best.append(choice)
    return best


def proposals(memory: StepMemory) -> list[tuple[int, ...]]:
    """The cheapest blocks for ever lower peaks: from none to those with the lowest peak."""
    every = tuple(range(len(memory.blocks)))
    found: list[tuple[int, ...]] = []
    blocks: tuple[int, ...] | None = ()
    distance = max(1, (peak_with(memory, ()) - peak_with(memory, every)) // STEPS)
    while blocks is not None:
        found.append(blocks)
        blocks = cheapest_blocks(memory, peak_with(memory, blocks) - distance)
    return found


def peak_with(memory: StepMemory, chosen: Sequence[int]) -> int:
    """The peak of a step that recomputes these blocks."""
    freed, peak = 0, 0
    for number, block in enumerate(memory.blocks):
        peak = max(peak, (block.again_bytes if number in chosen else block.peak_bytes) - freed)
        freed += block.freed_bytes if number in chosen else 0
    return max(peak, memory.loss_bytes - freed)
