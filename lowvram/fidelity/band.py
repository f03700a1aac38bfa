"""How far a loss history is from those of reference runs that differ only in their seeds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

Losses = Sequence[float]  # by step


class Bounds(NamedTuple):
    """The range in which the point's loss at one step may lie, and its middle."""

    low: float
    mean: float
    high: float


def band(references: Sequence[Losses]) -> list[Bounds]:
    """For each step, the references' mean loss, plus and minus the difference of their largest and smallest loss.

    That is wider than their span, because the point shares its seed with one reference: with the same losses up to
    rounding, it would often lie at the very edge of the span.
    """
    bounds = []
    for losses in zip(*references, strict=True):
        mean, spread = fmean(losses), max(losses) - min(losses)
        bounds.append(Bounds(mean - spread, mean, mean + spread))
    return bounds


def loss_gap(losses: Losses, bounds: Sequence[Bounds]) -> float:
    """The largest distance of any step's loss from the band, relative to the band's mean loss at that step; 0 if all
    steps are inside."""
    gaps = (
        max(bound.low - loss, loss - bound.high, 0.0) / abs(bound.mean)
        for loss, bound in zip(losses, bounds, strict=True)
        if bound.mean
    )
    return max(gaps, default=0.0)
