"""Chooses the blocks that a knob treats, where it leaves that to the plan (`Knob.with_blocks`): the fewest that fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lowvram.config.errors import require
from lowvram.config.settings import Settings
from lowvram.planning.estimate import Fields
from lowvram.planning.recomputation import best_blocks, step_memory
from lowvram.planning.trace.events import Trace


class Attempt(NamedTuple):
    """A point with some blocks chosen."""

    fields: Fields  # of its row, as the planner makes them
    trace: Trace

    @property
    def fits(self) -> bool:
        return self.fields["plan"]["fits"]


def choose_blocks(names: Sequence[str], attempt: Callable[[tuple[int, ...]], Attempt]) -> Fields:
    """The fields of the attempt with the fewest blocks that fits; if none fits, of the one with all.

    Dynamic programming proposes the best blocks of each number, by the sum of their tensors. Which number it takes is
    found by bisection over plans of these, as what an allocator needs for tensors isn't their sum.
    """
    none, every = (), tuple(range(len(names)))
    if attempt(none).fits or not attempt(every).fits:
        return attempt(none if attempt(none).fits else every).fields
    proposals = [*best_blocks(step_memory(attempt(none).trace, attempt(every).trace, names)), every]
    first = bisect_left(proposals, True, 0, len(proposals) - 1, key=lambda blocks: attempt(blocks).fits)
    return attempt(proposals[first]).fields


def decide(settings: Settings, group: str, blocks: Sequence[int]) -> Settings:
    """The settings, with these blocks chosen for the knob of a group."""
    knob: Any = settings.groups[group].with_blocks(blocks)
    return replace(settings, groups={**settings.groups, group: knob})


def require_budget(group: str, option: str, budget_bytes: int | None) -> None:
    """Raises BadInput if there is no budget that the choice could be made for."""
    allowed = f"a budget, such as 8GiB, with {group}={option}, unless it is for a card whose memory is known"
    require(bool(budget_bytes), "vram", None, allowed)
