"""The report of plan_accuracy_emulated.py, as a page of Markdown. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.benchmarks.accuracy import errors_of
from scripts.benchmarks.emulated_points import Point
from scripts.benchmarks.plan_accuracy_points import Spec
from scripts.benchmarks.plan_accuracy_report import Line, Quantity, Report, error_line

QUANTITIES = [
    Quantity("allocated", "allocated_bytes", "peak_bytes"),
    Quantity("reserved", "reserved_bytes", "reserved_bytes"),
]
BUDGET_SHARES = (1.0, 0.95)  # of the planned `least_vram_bytes`: a point ends ok under the first, not under the second
WANTED = {1.0: "ok", 0.95: "oom"}


@dataclass(frozen=True)
class EmulatedReport:
    """Planned beside what torch's allocator did on emulated cards; lines of the files by key."""

    points: Sequence[Point]
    predictions: Mapping[str, Line]
    measured: Mapping[str, Line]
    budgets: Mapping[str, Line]
    key_of: Callable[[Point], str]

    def lines(self) -> list[str]:
        report = self.report
        compared = [point for point in self.points if report.is_compared(named(point))]
        groups = {
            "all": compared,
            "held out": [point for point in compared if point.is_held_out],
            "not held out": [point for point in compared if not point.is_held_out],
            **{f"{card}": [point for point in compared if point.card == card] for card in self.of("card")},
            **{f"{name}": [point for point in compared if point.spec.family == name] for name in self.of("family")},
        }
        text = [
            "# Plans beside torch's real allocator on emulated cards",
            "",
            "**Emulated: memory only** ([how](../../../tests/emulated_cuda/README.md)). Workspaces of cuDNN and the "
            "size of the CUDA context aren't known there, so neither is part of these figures.",
            "",
            f"{len(self.points)} points, {len(compared)} of them planned and run; MiB.",
            "",
            "| | points | median | p95 | largest | signed median |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        text += [line for name, points in groups.items() for line in self.summary(name, points)]
        text += ["", *self.budget_lines(), "", "## Points", "", "*: held out.", ""]
        return [*text, *report.table([named(point) for point in compared]), "", *report.failures()]

    def of(self, what: str) -> list[str]:
        """The cards or families, in their order."""
        return list(dict.fromkeys(p.card if what == "card" else p.spec.family for p in self.points))

    @property
    def report(self) -> Report:
        def by_name(lines: Mapping[str, Line]) -> dict[str, Line]:
            keys = {named(point).name: self.key_of(point) for point in self.points}
            return {name: lines[key] for name, key in keys.items() if key in lines}

        return Report(
            [named(p) for p in self.points], by_name(self.predictions), by_name(self.measured), QUANTITIES, {}
        )

    def summary(self, name: str, points: Sequence[Point]) -> Iterator[str]:
        for each in QUANTITIES:
            pairs = self.report.pairs(map(named, points), each.planned, each.measured)
            yield error_line(f"{each.name}, {name}", errors_of(pairs))

    def budget_lines(self) -> list[str]:
        """How the points that were run under their own least memory, and under less, ended."""
        told = []
        for share, wanted in WANTED.items():
            lines = [line for line in self.budgets.values() if line["share"] == share]
            num_right = sum(line["status"] == wanted for line in lines)
            others = [f"`{line['name']}` ({line['status']})" for line in lines if line["status"] != wanted]
            rest = f" Others: {', '.join(others)}." if others else ""
            told += [f"- under `vram=` {share:.0%} of `least_vram_bytes`: {num_right} of {len(lines)} {wanted}.{rest}"]
        return ["Held-out points under budgets of their own plan:", "", *told]


def named(point: Point) -> Spec:
    """The point's spec by its name, with a mark if it is held out."""
    return point.spec._replace(name=f"{point.name}{' *' if point.is_held_out else ''}")
