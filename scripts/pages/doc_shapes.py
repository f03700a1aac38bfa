"""The shapes that a measured table of the documents may have, as lines of Markdown, and the figures in its cells."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lowvram.config.errors import Refused
from lowvram.results.columns import value_at
from lowvram.results.files.durable import write_text
from lowvram.results.metrics import METRICS, Better, Shown
from lowvram.results.row import GIB, MIB, Row, Status
from lowvram.results.row import KINDS as KINDS_OF_ROWS
from lowvram.results.table import label, render
from scripts.benchmarks import bench_knobs_report
from scripts.benchmarks.book import Book
from scripts.pages.technique_page import machine
from scripts.pages.technique_rows import Sweep, point_words, read, write

KINDS = tuple(kind for kind in KINDS_OF_ROWS if kind not in ("inputs", "other"))
Figure = Callable[[Row], str]


class Place(NamedTuple):
    """Where a page has a table."""

    shape: str
    name: str  # of its rows
    about: str  # which figures, or what else the shape is told
    body: str  # what stands there
    commands: str  # of the last block of bash above


def number(path: str, form: str, divisor: float = 1) -> Figure:
    """A row's value; a dash where there is none."""

    def text(row: Row) -> str:
        value = value_at(row, path)
        return "–" if value is None else format(value / divisor, form)

    return text


def beyond(row: Row) -> str:
    """By how much more than its tensors a process on a CPU grew."""
    return f"{(row['memory']['process_peak_bytes'] - row['memory']['peak_bytes']) / MIB:.1f}"


FIGURES: dict[str, Figure] = {
    "peak": number("memory.peak_bytes", ".1f", MIB),
    **{kind: number(f"memory.by_kind_max.{kind}", ".1f", MIB) for kind in KINDS},
    "growth": number("memory.process_peak_bytes", ".1f", MIB),
    "beyond": beyond,
    "moved": number("traffic.to_host_bytes", ".1f", MIB),
    "planned peak": number("plan.allocated_bytes", ".1f", MIB),
    **{f"planned {kind}": number(f"plan.by_kind_max.{kind}", ".1f", MIB) for kind in KINDS},
    "planned step": number("plan.step_ms", ",.0f"),
    "weights": number("model.parameters", ",.0f"),
    "last loss": number("loss.last", ".4f"),
    "evaluation": number("loss.eval", ".4f"),
    "gradient error": number("fidelity.gradient_error", ".1e"),
    "loss gap": number("fidelity.loss_gap", ".3f"),
}


class Shape(ABC):
    """How a place gets its lines, out of what is kept in a folder."""

    @abstractmethod
    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        """What its commands have left and printed."""

    @abstractmethod
    def lines(self, place: Place, folder: Path) -> Iterable[str]:
        """What shall stand there. Refused: nothing is kept, or not of these commands."""


@dataclass(frozen=True)
class OfRows(Shape):
    """Drawn from the rows of sweeps and runs."""

    draw: Callable[[Sweep, list[str]], Iterable[str]]  # told the figures' names

    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        if not rows:
            raise Refused(f"{place.name}: its commands have left no row")
        write(folder / "docs" / f"{place.name}.jsonl", Sweep(place.commands, rows))

    def lines(self, place: Place, folder: Path) -> Iterable[str]:
        path = folder / "docs" / f"{place.name}.jsonl"
        sweep = read(path) if path.is_file() else Sweep("", [])
        hold_to(place, sweep.command)
        return self.draw(sweep, [name for name in place.about.split(" / ") if name])


class Printed(Shape):
    """An excerpt of what was printed: written by hand, but nothing stands there that wasn't printed, in this order."""

    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        write_text(folder / "docs" / f"{place.name}.txt", f"{place.commands}\n{printed}")

    def lines(self, place: Place, folder: Path) -> Iterable[str]:
        path = folder / "docs" / f"{place.name}.txt"
        commands, _, printed = (path.read_text(encoding="utf-8") if path.is_file() else "").partition("\n\n")
        hold_to(place, f"{commands}\n")
        shown = place.body.strip("\n").splitlines() or ["```", *printed.splitlines(), "```"]
        rest = iter(printed.splitlines())
        for line in shown:
            if line not in ("```", "...") and line not in rest:  # which goes on from there
                raise Refused(f"its commands didn't print this, or not there: {line}")
        return shown


class Knobs(Shape):
    """What scripts/benchmarks/bench_knobs.py has kept of one model."""

    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        raise Refused(f"run scripts/benchmarks/bench_knobs.py to={folder / 'bench_knobs.jsonl'}")

    def lines(self, place: Place, folder: Path) -> Iterable[str]:
        lines = map(json.loads, (folder / "bench_knobs.jsonl").read_text(encoding="utf-8").splitlines())
        return bench_knobs_report.table([line for line in lines if line["model"] == place.name])


class Card(Shape):
    """The points of an item of `scripts/gpu_check agenda` on a card, whose folder of results is named."""

    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        raise Refused("run scripts/gpu_check agenda on a card, then scripts/gpu_check agenda keep")

    def lines(self, place: Place, folder: Path) -> Iterator[str]:
        item = Book(folder.parent / place.about / "agenda.jsonl").read().get(place.name)
        if item is None:
            raise Refused(f"{place.about}: no item {place.name} of its agenda is kept")
        rows = [row for row in item["found"] if row["status"] == Status.OK]
        first = rows[0]
        yield "| switches | peak GiB | smaller by | ms a step |"
        yield "|---|---:|---:|---:|"
        for words, row in zip(names(rows), rows, strict=True):
            less = first["memory"]["peak_bytes"] / row["memory"]["peak_bytes"]
            times = "" if row is first else f"{less:.1f} ×"
            ms = row["time"]["step_ms_p50"]
            yield f"| {typed(words)} | {row['memory']['peak_bytes'] / GIB:.2f} | {times} | {ms:,.0f} |"


class Figures(Shape):
    """What lowvram tells of a row, and where: the list of results/metrics.py."""

    def keep(self, place: Place, rows: Sequence[Row], printed: str, folder: Path) -> None:
        raise Refused("it is made of lowvram/results/metrics.py: no command leaves it")

    def lines(self, place: Place, folder: Path) -> Iterable[str]:
        yield "| figure | in the row | in table.csv | unit | better | table | loggers |"
        yield "|---|---|---|---|---|---|---|"
        for metric in METRICS:
            title = metric.title.format(unit="MiB")
            better = "" if metric.better is Better.NEITHER else metric.better.name.lower()
            logged = f"`{metric.logger_name}`" if metric.logger_name else ""
            names = f"`{metric.path}` | `{metric.csv_name}`"
            yield f"| {title} | {names} | {metric.unit} | {better} | {shown_in(metric.shown_in)} | {logged} |"


def shown_in(places: Shown) -> str:
    """Which tables have a column of it, in words; table.csv has them all."""
    words = {
        Shown.TABLE: "yes",
        Shown.TABLE_OF_PLANS: "of plans",
        Shown.TABLE_WITH_BUDGET: "with a budget",
        Shown.TABLE_WITH_PADDING: "with padding",
        Shown.TABLE_OF_FILES: "where exported files differ",
    }
    return ", ".join(text for place, text in words.items() if place in places)


def hold_to(place: Place, commands: str) -> None:
    if place.commands != commands:
        raise Refused(f"the commands above aren't those of what is kept: type --run {place.name}")


def names(rows: Sequence[Row]) -> list[list[str]]:
    """Of each row the words that not all have."""
    words = [point_words(row) for row in rows]
    return [[word for word in each if not all(word in others for others in words)] for each in words]


def points(sweep: Sweep, figures: list[str]) -> Iterator[str]:
    """A line for each point, a column for each figure."""
    yield f"| | {' | '.join(figures)} |"
    yield "|---|" + "---:|" * len(figures)
    for words, row in zip(names(sweep.rows), sweep.rows, strict=True):
        yield f"| {typed(words)} | {' | '.join(cells(row, figures))} |"


def grid(sweep: Sweep, figures: list[str]) -> Iterator[str]:
    """A column for each of the last words, a line for what stands before them, all figures in a cell."""
    places: dict[str, dict[str, str]] = {}
    for (*before, last), row in zip(names(sweep.rows), sweep.rows, strict=True):
        places.setdefault(typed(before), {})[f"`{last}`"] = " / ".join(cells(row, figures))
    columns = [*dict.fromkeys(column for line in places.values() for column in line)]
    yield f"| {' / '.join(figures)} | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for name, line in places.items():
        yield f"| {name} | {' | '.join(line.get(column, '') for column in columns)} |"


def typed(words: Sequence[str]) -> str:
    return f"`{' '.join(words)}`" if words else "defaults"


def cells(row: Row, figures: Sequence[str]) -> list[str]:
    if row["status"] != Status.OK:
        return [row["status"], *[""] * (len(figures) - 1)]
    return [FIGURES[name](row) for name in figures]


def table(sweep: Sweep, figures: list[str]) -> Iterator[str]:
    """As lowvram prints it; below it the machine."""
    yield from ("```", *render(sweep.rows).splitlines(), "```", "")
    yield f"({', '.join(dict.fromkeys(map(machine, sweep.rows)))}.)"


def failures(sweep: Sweep, figures: list[str]) -> Iterator[str]:
    """What lowvram prints of points that didn't end well."""
    yield "```"
    yield from (f"{label(row)}: {row['status']}: {row['reason']}" for row in sweep.rows if row["status"] != Status.OK)
    yield "```"


SHAPES: dict[str, Shape] = {
    "points": OfRows(points),
    "grid": OfRows(grid),
    "table": OfRows(table),
    "failures": OfRows(failures),
    "printed": Printed(),
    "knobs": Knobs(),
    "card": Card(),
    "figures": Figures(),
}
