"""The report of plan_accuracy.py: predicted beside measured, as a page of Markdown. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.benchmarks.accuracy import Errors, Pair, errors_of, verdicts_of
from scripts.benchmarks.plan_accuracy_points import Spec

SHARES = (0.9, 1.1, 1.25)  # budgets, as shares of what was measured
MARGINS = (0.0, 0.1)
Line = dict[str, Any]  # what a file says of a point


class Quantity(NamedTuple):
    """What is planned and measured of a point: where it is found in `plan` and in `memory`."""

    name: str
    planned: str
    measured: str


@dataclass(frozen=True)
class Report:
    """Predicted beside measured."""

    specs: Sequence[Spec]
    predictions: Mapping[str, Line]  # by the name of the point
    measured: Mapping[str, Line]
    quantities: Sequence[Quantity]  # budgets are judged by the last
    baselines: Mapping[str, str]  # what they are called, and where predictions have them

    def lines(self) -> list[str]:
        text = [f"{len(self.specs)} points, {sum(map(self.is_compared, self.specs))} of them planned and measured."]
        text += [*self.late(), ""]
        for family in dict.fromkeys(spec.family for spec in self.specs):
            specs = [spec for spec in self.specs if spec.family == family and self.is_compared(spec)]
            text += [f"## {family}", "", *self.summary(specs), "", *self.table(specs), ""] if specs else []
        return [*text, *self.failures()]

    def is_compared(self, spec: Spec) -> bool:
        return all(self.pair(spec, quantity.planned, quantity.measured) for quantity in self.quantities)

    def pair(self, spec: Spec, planned: str, measured: str) -> Pair | None:
        """None where one of the two is missing."""
        one, other = self.predictions.get(spec.name, {}), self.measured.get(spec.name, {})
        is_whole = other.get("status") == "ok" and one.get(planned) and other.get(measured)
        return Pair(one[planned], other[measured]) if is_whole else None

    def pairs(self, specs: Iterable[Spec], planned: str, measured: str) -> list[Pair]:
        return [pair for spec in specs if (pair := self.pair(spec, planned, measured))]

    def summary(self, specs: Sequence[Spec]) -> list[str]:
        head = "| | points | median | p95 | largest | signed median |"
        rows = [(each.name, each.planned, each.measured) for each in self.quantities]
        measured = self.quantities[0].measured
        rows += [(f"baseline: {name}", planned, measured) for name, planned in self.baselines.items()]
        errors = [(name, errors_of(self.pairs(specs, *keys))) for name, *keys in rows]
        told = [error_line(name, each) for name, each in errors]
        return [head, "|---|---:|---:|---:|---:|---:|", *told, "", *self.budgets(specs)]

    def budgets(self, specs: Sequence[Spec]) -> list[str]:
        last = self.quantities[-1]
        pairs, shares = self.pairs(specs, last.planned, last.measured), ", ".join(f"{share:g}" for share in SHARES)
        told = [
            f"{one.false_fits} false fits and {one.false_refusals} false refusals in {one.num_budgets} with a margin "
            f"of {margin:.0%}"
            for margin in MARGINS
            for one in [verdicts_of(pairs, SHARES, margin)]
        ]
        return [f"Budgets of {shares} times the measured {last.name}: {'; '.join(told)}."]

    def table(self, specs: Sequence[Spec]) -> list[str]:
        """A row a point, the largest error first."""
        names = [f"planned {each.name} | measured | error" for each in self.quantities]
        head = [f"| point | {' | '.join(names)} |", f"|---|{'---:|---:|---:|' * len(names)}"]
        first = self.quantities[0]
        sized = {spec.name: self.pairs([spec], first.planned, first.measured)[0] for spec in specs}
        ordered = sorted(specs, key=lambda spec: -abs(sized[spec.name].error))
        return [*head, *(self.row(spec) for spec in ordered)]

    def row(self, spec: Spec) -> str:
        pairs = [self.pairs([spec], each.planned, each.measured)[0] for each in self.quantities]
        sizes = [f"{mib(one.planned_bytes)} | {mib(one.measured_bytes)} | {one.error:+.1%}" for one in pairs]
        return f"| `{spec.name}` | {' | '.join(sizes)} |"

    def failures(self) -> list[str]:
        """What is not in the tables, and why."""
        told = [f"- `{spec.name}`: {self.why_not(spec)}" for spec in self.specs if not self.is_compared(spec)]
        return ["## Not compared", "", *told] if told else ["Every point could be planned and ran."]

    def why_not(self, spec: Spec) -> str:
        planned, measured = self.predictions.get(spec.name), self.measured.get(spec.name)
        if planned is None or planned["status"] != "ok":
            return f"not planned: {planned['reason'] if planned else 'nobody asked'}"
        return "not measured yet" if measured is None else f"{measured['status']}: {measured['reason']}"

    def late(self) -> list[str]:
        """A prediction that is younger than its measurement is no test."""
        names = self.predictions.keys() & self.measured.keys()
        late = sum(self.predictions[name]["time"] > self.measured[name]["time"] for name in names)
        return [f"{late} predictions are younger than their measurements, and so no test."] if late else []


def error_line(name: str, errors: Errors | None) -> str:
    if errors is None:
        return f"| {name} | 0 | – | – | – | – |"
    sizes = f"{errors.median:.1%} | {errors.p95:.1%} | {errors.largest:.1%} | {errors.signed:+.1%}"
    return f"| {name} | {errors.num_points} | {sizes} |"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
