"""recomputation: the cheapest blocks, compared with trying all subsets, on made-up numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch

from lowvram.planning.recomputation import STEPS, Block, StepMemory, cheapest_blocks, peak_with, proposals


def subsets(num_blocks: int) -> Iterator[tuple[int, ...]]:
    for size in range(num_blocks + 1):
        yield from combinations(range(num_blocks), size)


def drawn(seed: int, num_blocks: int) -> StepMemory:
    draw = torch.Generator().manual_seed(seed)

    def number(largest: int) -> int:
        return int(torch.randint(largest, (), generator=draw))

    blocks = [Block(1 + number(9), number(50), number(200), number(200)) for _ in range(num_blocks)]
    return StepMemory(blocks, number(300))


def cost_of(memory: StepMemory, blocks: Sequence[int]) -> int:
    return sum(memory.blocks[number].cost for number in blocks)


@pytest.mark.parametrize("seed", range(20))
def test_no_cheaper_set_fits(seed: int) -> None:
    memory = drawn(seed, num_blocks=8)
    for budget in range(0, 300, 15):
        fitting = [cost_of(memory, each) for each in subsets(8) if peak_with(memory, each) <= budget]
        found = cheapest_blocks(memory, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert peak_with(memory, found) <= budget
            assert cost_of(memory, found) == min(fitting)


@pytest.mark.parametrize("seed", range(20))
def test_proposals_are_the_cheapest_ways_to_lower_the_peak(seed: int) -> None:
    """Each is the cheapest with its peak, and there is no set between two of them that costs less than the second."""
    memory = drawn(seed, num_blocks=8)
    sets = proposals(memory)
    peaks = [peak_with(memory, each) for each in sets]
    assert sets[0] == ()
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == min(peak_with(memory, each) for each in subsets(8))
    for before, found in zip(peaks, sets[1:], strict=False):
        assert cost_of(memory, found) == min(
            cost_of(memory, each) for each in subsets(8) if peak_with(memory, each) < before
        )


def test_of_blocks_that_cost_the_same_those_that_free_the_most_are_taken() -> None:
    blocks = [Block(1, size, 10, 10) for size in (5, 20, 10)]
    assert proposals(StepMemory(blocks, 100)) == [(), (1,), (1, 2), (0, 1, 2)]
    assert proposals(StepMemory(blocks, 0)) == [()]  # all the same


def test_two_cheap_blocks_are_taken_before_a_costly_one() -> None:
    blocks = [Block(9, 20, 10, 10), Block(2, 10, 10, 10), Block(2, 10, 10, 10)]
    assert cheapest_blocks(StepMemory(blocks, 100), 80) == (1, 2)


def test_many_different_blocks_take_a_bounded_number_of_proposals() -> None:
    """Of forty blocks hardly two are alike."""
    blocks = [Block(1 + number * 7 % 19, 1000 + number * 37 % 101, 0, 0) for number in range(40)]
    assert len(proposals(StepMemory(blocks, 10**6))) <= STEPS + 2
