"""adapter=badam: block coordinate descent, one block after another, each with an optimizer of its own for some steps.

Luo et al., "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language Models" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import final

import torch

from lowvram.core.heaviest import extremes
from lowvram.core.seeds import generator_for
from lowvram.knobs.adapter.over_time import Active, OverTime, blocks_train, check_period
from lowvram.knobs.adapter.units import BEFORE


class Order(Enum):
    """In which order the blocks have their turns. The names are what a user types."""

    random = auto()  # another one in each round
    ascending = auto()  # from the input to the output
    descending = auto()


@final
@dataclass(frozen=True)
class BAdam(OverTime):
    """`blocks` blocks train at a time, and nothing else. In a round each has one turn of `every` steps, and what is
    outside the blocks has one, too, as if it were the last block."""

    blocks: int = 1
    every: int = 20
    order: Order = Order.random
    ends: bool = True

    def __post_init__(self) -> None:
        check_period(self.blocks, self.every)

    def what_rests(self) -> str:
        ends = "" if self.ends else ", and what is outside the blocks never does"
        return f"only {blocks_train(self.blocks)} at a time, for {self.every} steps{ends}"

    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        num_turns = self.num_turns(num_blocks)
        period = step // self.every
        order = self.order_of_round(period // num_turns, num_blocks, seed)
        first = period % num_turns * self.blocks
        return self.with_ends(order[first : first + self.blocks], num_blocks)

    def num_coordinates(self, num_blocks: int) -> int:
        """How many blocks have turns, the ends as one of them."""
        return num_blocks + self.ends

    def num_turns(self, num_blocks: int) -> int:
        """Of a round, rounded up: in the last one fewer blocks may be left."""
        return -(-self.num_coordinates(num_blocks) // self.blocks)

    def order_of_round(self, number: int, num_blocks: int, seed: int) -> list[int]:
        """The blocks by their numbers from 1, in the order of their turns; the ends count as the last one."""
        ascending = list(range(1, 1 + self.num_coordinates(num_blocks)))
        match self.order:
            case Order.random:
                generator = generator_for(seed, f"badam {number}", torch.device("cpu"))
                return (1 + torch.randperm(len(ascending), generator=generator)).tolist()
            case Order.ascending:
                return ascending
            case Order.descending:
                return ascending[::-1]

    def with_ends(self, blocks: Sequence[int], num_blocks: int) -> Active:
        """The units of these blocks: the ends are those before and after the others."""
        return frozenset(blocks) | ({BEFORE} if num_blocks + 1 in blocks else set())

    def heaviest(self, sizes: Sequence[int]) -> list[Active]:
        num_blocks = len(sizes) - 2
        lowest_first = sorted(self.choices(num_blocks, sizes), key=min)
        kept, most = list[Active](), 0
        for choice in lowest_first:  # below the lowest block that trains no activations are kept
            num_elements = sum(sizes[unit] for unit in choice)
            if min(choice) <= BEFORE + 1 or num_elements > most:
                kept.append(choice)
            most = most if BEFORE in choice else max(most, num_elements)
        return kept

    def choices(self, num_blocks: int, sizes: Sequence[int]) -> list[Active]:
        """The turns of a round; with a random order, those of all that may take the most memory."""
        if self.order is not Order.random:
            firsts = range(0, self.num_turns(num_blocks) * self.every, self.every)
            return [self.active(step, num_blocks, seed=0) for step in firsts]
        last = self.num_coordinates(num_blocks)
        with_ends = extremes(range(1, last), self.blocks - 1, sizes) if self.ends else []
        return [
            *(self.with_ends([*others, last], num_blocks) for others in with_ends),
            *(
                frozenset({lowest, *others})
                for lowest in range(1, num_blocks + 1)
                for others in extremes(range(lowest + 1, num_blocks + 1), self.blocks - 1, sizes)
            ),
        ]
