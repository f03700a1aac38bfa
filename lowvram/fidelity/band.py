"""How far a loss history lies from those of references that differ in nothing but their seeds. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

Losses = Sequence[float]  # of one step after another


class Bounds(NamedTuple):
    """Between which losses a step of the point may lie, and their middle."""

    low: float
    mean: float
    high: float


def band(references: Sequence[Losses]) -> list[Bounds]:
    """Of each step: the references' mean, less and more the distance between their largest and their smallest loss.

    So wide, because a point shares its seed with a reference: had it that one's losses but for rounding, it would often
    lie at the very edge of what the references themselves span.
    """
    bounds = []
    for losses in zip(*references, strict=True):
        mean, spread = fmean(losses), max(losses) - min(losses)
        bounds.append(Bounds(mean - spread, mean, mean + spread))
    return bounds


def loss_gap(losses: Losses, bounds: Sequence[Bounds]) -> float:
    """The largest distance of any step from the band, as a share of the band's mean loss there; 0 inside all along."""
    gaps = (
        max(each.low - loss, loss - each.high, 0.0) / abs(each.mean)
        for loss, each in zip(losses, bounds, strict=True)
        if each.mean
    )
    return max(gaps, default=0.0)
