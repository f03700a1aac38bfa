"""The report of bench_search.py: a search's pick beside the best of a grid, as a page of Markdown. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import correlation, median
from typing import Any, NamedTuple

from lowvram.results.row import Status, size_text

Plans = Mapping[str, Mapping[str, Any]]  # of a grid, by the names of its points


class Point(NamedTuple):
    """Of the grid, as it was measured."""

    words: list[str]
    samples_per_s: float
    grown_bytes: int
    disturbed: float

    @property
    def name(self) -> str:
        return " ".join(self.words)


class Probe(NamedTuple):
    """Of a search."""

    name: str
    status: str
    grown_bytes: int | None  # null: it didn't run to its end


class Result(NamedTuple):
    """Of one budget."""

    vram: str
    num_tried: int  # points of the grid, until so many had run
    rates: dict[str, list[float]]  # samples/s of each round under the cap, by the name of the point
    pick: str
    probes: list[Probe]
    disturbed: float  # what others took of the cores, in the median of these rounds
    lost: str  # where the best went, if it isn't the pick

    @property
    def best(self) -> str:
        return max(self.rates, key=lambda name: median(self.rates[name]))

    @property
    def shares(self) -> list[float]:
        """What the pick reaches of the best, round by round."""
        return [one / best for one, best in zip(self.rates[self.pick], self.rates[self.best], strict=True)]


def lost(found: Result, plans: Plans) -> str:
    """Where the best went."""
    if found.best == found.pick:
        return "-"
    if found.best in (probe.name for probe in found.probes):
        return "probed, and slower there"
    plan, fitting = plans[found.best], [plan["step_ms"] for plan in plans.values() if plan["fits"]]
    if not plan["fits"]:
        needed_bytes = plan["least_vram_bytes"] * (1 + plan["margin"])
        return f"planned too large: {size_text(needed_bytes)}, its margin of {plan['margin']:.0%} included"
    rank = 1 + sum(step_ms < plan["step_ms"] for step_ms in fitting)
    return f"predicted too slow: {rank} of {len(fitting)} that fit by their plans"


def ranks(values: Sequence[float]) -> list[int]:
    ordered = sorted(values)
    return [ordered.index(value) for value in values]


def lines(title: str, grid: Sequence[Point], results: Sequence[Result], plans: Plans) -> list[str]:
    """A section of the page."""
    sizes = [point.grown_bytes for point in grid]
    agreement = correlation(
        ranks([plans[point.name]["step_ms"] for point in grid]), ranks([-point.samples_per_s for point in grid])
    )
    disturbed = median(point.disturbed for point in grid)
    return [
        f"## {title}",
        "",
        f"{len(grid)} points, whose processes grew by {size_text(min(sizes))} to {size_text(max(sizes))}; others took "
        f"{disturbed:.0%} of the cores meanwhile (median). Correlation of the ranks of predicted and measured times: "
        f"{agreement:.2f}.",
        "",
        "| vram | tried | pick | best | pick / best | where the best was lost |",
        "|---:|---:|---|---|---:|---|",
        *(picked(one, len(grid)) for one in results),
        "",
        "| vram | probes | of these out of memory | largest growth of a probe's process |",
        "|---:|---:|---:|---:|",
        *map(probed, results),
        "",
        "| vram | measured in turns | samples/s: median (every round) | taken by others |",
        "|---:|---|---:|---:|",
        *(raced(one, name) for one in results for name in one.rates),
    ]


def picked(one: Result, num_points: int) -> str:
    share = f"{median(one.shares):.1%} ({min(one.shares):.1%} to {max(one.shares):.1%})"
    return f"| {one.vram} | {one.num_tried} of {num_points} | {one.pick} | {one.best} | {share} | {one.lost} |"


def probed(one: Result) -> str:
    num_over = sum(probe.status == Status.OOM for probe in one.probes)
    grown = size_text(max(probe.grown_bytes or 0 for probe in one.probes))
    return f"| {one.vram} | {len(one.probes)} | {num_over} | {grown} |"


def raced(one: Result, name: str) -> str:
    rates = one.rates[name]
    every = ", ".join(f"{rate:.2f}" for rate in rates)
    return f"| {one.vram} | {name} | {median(rates):.2f} ({every}) | {one.disturbed:.0%} |"
