"""How far plans lie from what was measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple, final


@final
@dataclass(frozen=True)
class Pair:
    """One quantity of one point, as it was planned and as it was measured: bytes, both above 0."""

    planned_bytes: int
    measured_bytes: int

    def __post_init__(self) -> None:
        if self.planned_bytes <= 0 or self.measured_bytes <= 0:
            raise ValueError(f"{self}: both must be above 0 bytes, else there is no relative error")

    @property
    def error(self) -> float:
        """Relative to what was measured; above 0: planned too much."""
        return self.planned_bytes / self.measured_bytes - 1


class Errors(NamedTuple):
    """Of several points, relative."""

    num_points: int
    median: float  # of the sizes of the errors, as are the next two
    p95: float
    largest: float
    signed: float  # median of the errors themselves


class Verdicts(NamedTuple):
    """What plans say of budgets near what was measured."""

    num_budgets: int
    false_fits: int  # planned to fit, and does not
    false_refusals: int  # planned not to fit, and does


def errors_of(pairs: Sequence[Pair]) -> Errors | None:
    """None where there are no points."""
    if not pairs:
        return None
    signed = [pair.error for pair in pairs]
    sizes = sorted(map(abs, signed))
    p95 = quantiles(sizes, n=20, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return Errors(len(sizes), median(sizes), p95, sizes[-1], median(signed))


def verdicts_of(pairs: Iterable[Pair], shares: Sequence[float], margin: float) -> Verdicts:
    """Judge each point against budgets.

    Args:
        shares: a budget as a share of what was measured: a point fits from 1 on.
        margin: by how much more than was planned must fit, as in `plan.margin`.
    """
    judged = [
        (pair.planned_bytes * (1 + margin) <= share * pair.measured_bytes, share >= 1)
        for pair in pairs
        for share in shares
    ]
    return Verdicts(len(judged), judged.count((True, False)), judged.count((False, True)))
