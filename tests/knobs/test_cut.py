"""Where a model is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import pytest

from lowvram.config.errors import BadInput
from lowvram.knobs.sharding.cut import balanced, sizes_of_stages, stage_bounds

Cut = tuple[int, ...]


def every_cut(num_blocks: int, num_stages: int) -> list[Cut]:
    ways = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(end - begin for begin, end in pairwise([0, *ends, num_blocks])) for ends in ways]


def slowest(costs: list[float], cut: Sequence[int]) -> float:
    first, *blocks, last = costs
    stages = [sum(blocks[begin:end]) for begin, end in stage_bounds(cut)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_as_fast_as_it_can_be(seed: int) -> None:
    random = Random(seed)
    num_blocks = random.randint(2, 8)
    costs = [random.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(num_blocks + 2)]
    num_stages = random.randint(1, num_blocks)
    found = sizes_of_stages(costs, num_stages, None)
    assert sum(found) == num_blocks
    assert min(found) >= 1
    assert slowest(costs, found) == pytest.approx(min(slowest(costs, way) for way in every_cut(num_blocks, num_stages)))


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_with_at_most_so_many_blocks_in_a_stage_is_the_fastest_of_these(seed: int) -> None:
    random = Random(seed)
    num_stages = random.randint(1, 4)
    num_blocks = random.randint(num_stages, 9)
    costs = [random.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(num_blocks + 2)]
    most = list(random.choice(every_cut(num_blocks, num_stages)))
    most[random.randrange(num_stages)] += random.randint(0, 3)
    cut = balanced(costs, num_stages, most)
    possible = [way for way in every_cut(num_blocks, num_stages) if all(map(int.__le__, way, most))]
    assert tuple(cut) in possible
    assert slowest(costs, cut) == pytest.approx(min(slowest(costs, way) for way in possible))


def test_a_cut_of_the_users_is_taken_or_refused_with_the_numbers() -> None:
    costs = [0.0, *[1.0] * 6, 0.0]
    assert sizes_of_stages(costs, 2, [4, 2]) == [4, 2]
    for given in ([3, 2], [6], [6, 0], [2, 2, 2]):
        with pytest.raises(BadInput, match=r"sharding.cut=.*for each of 2 stages how many of the model's 6 blocks"):
            sizes_of_stages(costs, 2, given)
    with pytest.raises(BadInput, match=r"sharding.pipeline=7: must be at most 6 stages in all"):
        sizes_of_stages(costs, 7, None)
