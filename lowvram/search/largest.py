"""The largest of some whole numbers that fits, where larger ones need more. Imports no torch.

Each try is a plan, which may take seconds, so few are made. What a value needs grows almost evenly: the next value is
where the line through two known ones reaches the budget. If that hasn't ruled out half of what was left, the next one
is in the middle, so that needs that grow unevenly (attention's matrix, for example) take few tries, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, final

from lowvram.config.errors import BadInput

MOST_GROWTH = 16  # times the largest value that fits, if the line through known ones is flatter
LEAST_LESS = 0.05  # share by which needs must fall to be told; allocators' rounding makes them fall by less
MOST_VALUE = 2**40  # above it nothing is tried: what is asked for takes no memory


@final
@dataclass(frozen=True)
class Solve:
    """conf/mode/solve.yaml. A child has values of `solve.key` planned until it knows the largest that fits."""


class Tried(NamedTuple):
    """A value and what it needs.

    Args:
        load: of the budget: at most 1 fits; None: the value is refused.
        refusal: why.
        is_chosen: whether the plan has chosen something, such as the number of parts, for this value alone.
    """

    value: int
    load: float | None
    refusal: str | None = None
    is_chosen: bool = False

    @property
    def fits(self) -> bool:
        return self.load is not None and self.load <= 1


@final
@dataclass
class Bracket:
    """The values that are known so far.

    Args:
        unit: values are multiples of it.

    Attributes:
        fitting: in ascending order; the last is the largest that is known to fit.
        above: the smallest that is known not to fit, or to be refused.
        known: those whose needs can be compared, in ascending order.
    """

    unit: int
    fitting: list[Tried] = field(default_factory=list)
    above: Tried | None = None
    known: list[Tried] = field(default_factory=list)
    num_tried: int = 0
    is_halved: bool = True  # whether the last try has ruled out half of the values that were left

    def add(self, tried: Tried) -> None:
        before = self._num_left
        self.num_tried += 1
        if not tried.fits:
            self.above = tried
        else:
            self.fitting = sorted([*self.fitting, tried])
        if tried.load is not None and not tried.is_chosen:
            self.known = sorted([*self.known, tried])
        self.is_halved = before is None or 2 * (self._num_left or 0) <= before

    @property
    def falling(self) -> tuple[int, int] | None:
        """Two values of which the larger needs less, so that there is no largest that fits; None: there are none."""
        needs = [(each.value, each.load or 0) for each in self.known]
        falls = ((one, two) for (one, more), (two, less) in pairwise(needs) if less < (1 - LEAST_LESS) * more)
        return next(falls, None)

    @property
    def _num_left(self) -> int | None:
        """How many values may still be the answer; None: any."""
        return None if self.above is None or not self.fitting else self.above.value - self.fitting[-1].value

    def next(self) -> int | None:
        """The value to try next; None: the answer is known, or there is none."""
        if self.falling is not None:
            return None
        if not self.fitting:
            return self._smaller()
        largest = self.fitting[-1].value
        if self.above is None:
            value = min(max(self._on_line() or self._at_least(), largest + self.unit), MOST_GROWTH * largest)
            return self._rounded(value) if value <= MOST_VALUE else None
        if self.above.value - largest <= self.unit:
            return None
        middle = (largest + self.above.value) // 2
        value = (self.is_halved and self._on_line()) or middle
        return self._rounded(min(max(value, largest + self.unit), self.above.value - self.unit))

    def _smaller(self) -> int | None:
        """As long as nothing fits."""
        assert self.above is not None
        if self.above.value <= self.unit:
            return None
        share = 0.5 if self.above.load is None else min(0.9, 1 / self.above.load)
        return self._rounded(int(self.above.value * share))

    def _at_least(self) -> int:
        """Twice the largest, or more if that fits for sure where needs grow evenly from some fixed one."""
        largest, load = self.fitting[-1][:2]
        return max(2 * largest, int(min(largest / load, MOST_VALUE)) if load else 0)

    def _on_line(self) -> int | None:
        """Where the line through the nearest known values reaches the budget; None: there is none."""
        candidates = [*self.fitting[-2:], *([] if self.above is None else [self.above])]
        known = [(each.value, each.load) for each in candidates if each.load is not None][-2:]
        if len(known) < 2 or known[1][1] <= known[0][1]:
            return None
        (first, low), (second, high) = known
        reached = first + (1 - low) * (second - first) / (high - low)
        return int(min(reached, 2 * MOST_VALUE))

    def _rounded(self, value: int) -> int:
        return max(self.unit, value // self.unit * self.unit)


def tried(value: int, planned: Mapping[str, Any]) -> Tried:
    """A value by what is planned of it.

    Args:
        planned: the fields of a row.

    Raises:
        BadInput: the device's memory isn't known.
    """
    if planned["status"] != "ok":
        return Tried(value, None, planned["reason"])
    plan = planned["plan"]
    if plan["budget_bytes"] is None:
        raise BadInput("vram", None, "a budget, such as 8GiB: the memory of this device isn't known")
    host_budget = plan["host_budget_bytes"] or math.inf
    load = max(plan["least_vram_bytes"] / plan["budget_bytes"], (plan["host_bytes"] or 0) / host_budget)
    return Tried(value, load * (1 + plan["margin"]), is_chosen=bool(plan.get("chosen")))


def largest_that_fits(attempt: Callable[[int], Tried | None], start: int, unit: int) -> Bracket:
    """Try values from about `start` on until the largest multiple of `unit` that fits is known.

    Args:
        attempt: None: the user asked to stop.
    """
    bracket, value = Bracket(unit), max(unit, start // unit * unit)
    while value is not None and (tried := attempt(value)) is not None:
        bracket.add(tried)
        value = bracket.next()
    return bracket
