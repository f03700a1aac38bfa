"""Where a model is cut into stages: so that the slowest is as fast as possible, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lowvram.config.errors import require


def balanced(costs: Sequence[float], num_stages: int, most: Sequence[int] | None = None) -> list[int]:
    """How many blocks each stage has, one at least, such that the largest cost of a stage is as small as possible; of
    several such ways the one whose later stages, which hold fewer parts at once, have more.

    Args:
        costs: of what stands before the blocks, of each block, and of what stands after them.
        most: how many blocks each stage can have, together enough; None: any number.
    """
    first, *blocks, last = costs
    sums = [0.0, *accumulate(blocks)]
    num_blocks = len(blocks)

    def cost(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (begin == 0) + last * (end == num_blocks)

    most = [num_blocks] * num_stages if most is None else most
    ends = range(1, min(most[0], num_blocks) + 1)
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, end), [end]) for end in ends}
    for stage in range(2, num_stages + 1):
        found: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, num_blocks + 1):
            starts = range(max(stage - 1, end - most[stage - 1]), end)
            ways = [(max(best[at][0], cost(at, end)), best[at][1], at) for at in starts if at in best]
            if ways:
                largest, before, at = min(ways, key=lambda way: (way[0], way[2]))
                found[end] = (largest, [*before, end - at])
        best = found
    return best[num_blocks][1]


def stage_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first block of each stage, and the one after its last."""
    return [*pairwise([0, *accumulate(sizes)])]


def sizes_of_stages(costs: Sequence[float], num_stages: int, given: Sequence[int] | None) -> list[int]:
    """How many blocks each stage has. Raises BadInput if there are too few, or the user's numbers don't fit.

    Args:
        costs: as for `balanced`.
        given: the user's numbers; None: balanced.
    """
    num_blocks = len(costs) - 2
    allowed = f"at most {num_blocks} stages in all, the number of the model's blocks"
    require(num_stages <= num_blocks, "sharding.pipeline", num_stages, allowed)
    if given is None:
        return balanced(costs, num_stages)
    allowed = f"null, or for each of {num_stages} stages how many of the model's {num_blocks} blocks it has, 1 or more"
    fits = len(given) == num_stages and sum(given) == num_blocks and min(given) > 0
    require(fits, "sharding.cut", [*given], allowed)
    return [*given]
