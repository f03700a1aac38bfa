"""The table of a sweep: a view rebuilt from the `result.json` of its points. Needs no torch.

Nothing else is kept, so there is no shared file that two writers could spoil.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lowvram.results.columns import Column, metric_column, value_at, words_column
from lowvram.results.files.durable import write_text
from lowvram.results.files.marker import point_of
from lowvram.results.metrics import LEAST_VRAM, METRICS, PADDING, PEAK, SLOW_STEP, Better, Shown, number_texts
from lowvram.results.row import (
    FILE_NAME,
    GIB,
    MIB,
    Row,
    Status,
    attempts_text,
    beyond_tensors_text,
    read,
    reruns_text,
    to_json,
)
from lowvram.results.shown import cell, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

SOURCES = {
    "cuda_allocator": "CUDA allocator",
    "tensor_ledger": "tensor bytes on CPU",
    "process": "growth of the process",
}
_LARGEST_IN_MIB, _SMALLEST_IN_GIB = 0.1 * GIB, 0.01 * GIB
_PLAIN_WIDTH = 10_000  # of the output if it isn't a terminal, so that nothing is wrapped
_BORDER = 3  # characters between a column and the next


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and the lines to print below them."""

    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].texts) if self.columns else 0

    @property
    def shown(self) -> list[Column]:
        return [column for column in self.columns if column.is_shown]


def collect(folder: str | Path) -> list[Row]:
    """The rows of a sweep's folder, in the order of its points; or the one row of a single run's folder.

    Only folders directly below are looked at: a sweep inside a sweep stays a sweep of its own.
    """
    return [row for _, row in collect_with_folders(folder)]


def collect_with_folders(folder: str | Path) -> list[tuple[Path, Row]]:
    """The same, each row with its point's folder."""
    folder = Path(folder)
    points = [path.parent for path in folder.glob(f"*/{FILE_NAME}")] or [folder]
    rows = [(point, row) for point in points if (row := read(point)) is not None]
    for point, row in rows:
        warn_if_exchanged(point, row)
    return sorted(rows, key=lambda pair: (pair[1]["index"] is None, pair[1]["index"] or 0, label(pair[1])))


def warn_if_exchanged(folder: Path, row: Row) -> None:
    """Warn, once, if the row is of another point than the one that the sweep ran in the folder."""
    point = point_of(folder)
    if point not in (None, row["id"]) and folder.absolute() not in _warned:
        _warned.add(folder.absolute())
        path = folder / FILE_NAME
        text = f"{path} is the row of another point than the sweep's: exchanged, or resumed with other overrides"
        print(shown(f"warning: {text}"), file=sys.stderr)


_warned: set[Path] = set()  # folders whose row is another point's


def label(row: Row) -> str:
    """The name of a row: the swept settings, else the point's id."""
    return shown(row["name"] or row["id"] or "-")


def build(rows: Sequence[Row], kept: Collection[str] = frozenset()) -> Table:
    """The table of `rows`; columns without a value are left out.

    `kept`: ids of the rows that an earlier launch measured. All columns of bytes share one unit.
    """
    columns = (
        words_column("name", map(label, rows)),
        words_column("status", (row["status"] for row in rows)),
        *_figures(rows),
    )
    return Table(tuple(column for column in columns if any(column.texts)), tuple(_notes(rows, kept)))


def _figures(rows: Sequence[Row]) -> Iterator[Column]:
    """The columns of the figures in METRICS, some followed by columns of words."""
    unit, kind, has_budget = memory_unit(rows), _kind(rows), _has_budget(rows)
    sources = [SOURCES.get(row["memory"]["source"]) for row in rows]
    kinds = {source for source in sources if source}
    # Peaks that were measured in different ways can't be compared.
    is_comparable = len(kinds) == 1
    beside = {
        PEAK: [words_column("memory source", () if is_comparable else sources)],
        LEAST_VRAM: [words_column("fits", (_fits(row) for row in rows) if has_budget else ())],
        SLOW_STEP: [
            words_column("p05-p95", _spreads(rows), is_exported=False),
            words_column("disturbed", ("yes" if row["disturbed"] else None for row in rows)),
        ],
    }
    for metric in METRICS:
        if metric.path == PEAK:
            better = metric.better if is_comparable else Better.NEITHER
            title = f"{metric.title} ({kinds.pop()})" if is_comparable else metric.title
            metric = replace(metric, title=title, better=better)
        if metric.shown_in & Shown.COLUMN:
            yield metric_column(rows, metric, unit, kind)
        yield from beside.get(metric.path, ())


def _kind(rows: Sequence[Row]) -> Shown:
    """Which figures a table shows. Beside measured figures one planned number is shown, unless there is a budget."""
    kind = Shown.TABLE
    if _is_plan(rows):
        kind |= Shown.TABLE_OF_PLANS
    if _has_budget(rows):
        kind |= Shown.TABLE_WITH_BUDGET
    if any(value_at(row, PADDING) for row in rows):
        kind |= Shown.TABLE_WITH_PADDING
    return kind


def _is_plan(rows: Sequence[Row]) -> bool:
    return not any(row["memory"]["peak_bytes"] for row in rows)


def _has_budget(rows: Sequence[Row]) -> bool:
    return _is_plan(rows) or any(row["config"].get("vram") for row in rows)


def memory_unit(rows: Sequence[Row]) -> tuple[str, int]:
    """The unit in which the sweep's memory is shown, and its number of bytes."""
    paths = ("memory.peak_bytes", "plan.allocated_bytes", "memory.by_kind_max.activations")
    values_by_path = {path: [value for row in rows if (value := value_at(row, path))] for path in paths}
    largest = max((value for values in values_by_path.values() for value in values), default=0)
    smallest = min((value for path in paths[:2] for value in values_by_path[path]), default=0)
    return ("GiB", GIB) if largest >= _LARGEST_IN_MIB and smallest >= _SMALLEST_IN_GIB else ("MiB", MIB)


def _spreads(rows: Sequence[Row]) -> Iterator[str | None]:
    fast = [value_at(row, "time.step_ms_p05") for row in rows]
    slow = [value_at(row, "time.step_ms_p95") for row in rows]
    texts = number_texts([*fast, *slow], num_digits=3)
    for low, high in zip(texts[: len(rows)], texts[len(rows) :], strict=True):
        yield f"{low}-{high}" if low and high else None


def _fits(row: Row) -> str | None:
    return {None: None, True: "yes", False: "no"}[row["plan"] and row["plan"].get("fits")]


def _notes(rows: Sequence[Row], kept: Collection[str]) -> Iterator[str]:
    """One line for each thing that a reader of the numbers must know."""
    is_mixed = len({row["provenance"]["git_sha"] for row in rows} - {None}) > 1
    for row in rows:
        name = label(row)
        if row["status"] != Status.OK:
            yield _one_line(f"{name}: {row['status'] or 'unfinished'}: {row['reason'] or 'no reason is known'}")
        if (row["plan"] or {}).get("reason"):
            yield _one_line(f"{name}: {row['plan']['reason']}")
        if attempts := attempts_text(row):
            yield f"{name}: {attempts}"
        if retries := row["memory"]["alloc_retries"]:
            yield f"{name}: {retries} allocations succeeded only after free memory was returned to the driver"
        if beyond := beyond_tensors_text(row):
            yield f"{name}: {beyond}"
        if row["disturbed"]:
            yield _one_line(f"{name}: disturbed: {row['disturbed']}")
        if others := reruns_text(row):
            yield _one_line(f"{name}: {others}")
        if row["time"]["is_cut"]:
            yield f"{name}: its window was cut short by measure.max_seconds, after {row['time']['steps']} steps"
        if (row["fidelity"] or {}).get("reason"):
            yield _one_line(f"{name}: its fidelity is not known: {row['fidelity']['reason']}")
        if row["semantics_changed"]:
            yield _one_line(f"{name}: semantics changed: {row['semantics_changed']}")
        if is_mixed or row["id"] in kept:
            yield f"{name}: measured at {_revision(row)}"


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()))


def _revision(row: Row) -> str:
    sha, is_dirty = row["provenance"]["git_sha"], row["provenance"]["dirty"]
    return f"{(sha or 'an unknown revision')[:19]}{' with uncommitted changes' if is_dirty else ''}"


def to_markdown(table: Table) -> str:
    """The table in Markdown; the best value of each column is in bold."""
    titles = [column.title for column in table.shown]
    rules = ["---:" if column.is_number else "---" for column in table.shown]
    cells = [
        [
            f"**{_escaped(column.texts[i])}**" if i in column.best else _escaped(column.texts[i])
            for column in table.shown
        ]
        for i in range(table.num_rows)
    ]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *cells)]
    notes = ["", *(f"- {_escaped(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([*lines, *notes]) + "\n"


def _escaped(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|"})
    return _one_line(text).translate(special)


def to_csv(table: Table) -> str:
    """The table as plain, unrounded numbers."""
    columns = [column for column in table.columns if column.is_exported]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(cell(column.title) for column in columns)
    writer.writerows(zip(*(map(cell, column.values) for column in columns), strict=True))
    return text.getvalue()


def save(folder: str | Path, rows: Sequence[Row]) -> None:
    """Writes `table.md`, `table.csv` and `rows.jsonl` into the sweep's folder, each in one move."""
    table = build(rows)
    write_text(Path(folder) / "table.md", to_markdown(table))
    write_text(Path(folder) / "table.csv", to_csv(table))
    write_text(Path(folder) / "rows.jsonl", "".join(f"{to_json(row)}\n" for row in rows))


def render(rows: Sequence[Row], stream: TextIO | None = None, kept: Collection[str] = frozenset()) -> str:
    """The table and its notes as text for `stream` (default: standard output), coloured for a terminal.

    Columns that a terminal is too narrow for follow in a second table below the first, and so on.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = build(rows, kept)
    with console.capture() as capture:
        for columns in _beside_names(table.shown, console.width):
            console.print(_grid(columns, table.num_rows, console))
        if not console.is_terminal and any(column.best for column in table.shown):
            console.print(Text("* the best of its column"))
        for note in table.notes:
            console.print(Text(note), soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _beside_names(columns: Sequence[Column], width: int) -> Iterator[Sequence[Column]]:
    """The columns, in order, in groups that fit into `width`; each begins with the first column, the rows' names."""
    names = columns[:1]
    group = [*names]
    for column in columns[1:]:
        if len(group) > 1 and sum(_width(one, width) + _BORDER for one in [*group, column]) + 1 > width:
            yield group
            group = [*names]
        group.append(column)
    yield group


def _width(column: Column, console_width: int) -> int:
    """Characters of a column: the longest value or word of the title. Longer names than a third of it are folded."""
    return min(max(map(len, [*column.title.split(), *column.texts])), console_width // 3)


def _grid(columns: Sequence[Column], num_rows: int, console: Console) -> RichTable:
    """The columns as a table of rich. The best values are coloured; where there is no colour they have a star."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    is_terminal = console.is_terminal
    grid = RichTable(box=box.SIMPLE_HEAD if is_terminal else box.ASCII2, header_style="bold")
    for column in columns:
        width = _width(column, console.width) if is_terminal else None
        side = "right" if column.is_number else "left"
        grid.add_column(Text(column.title), justify=side, overflow="fold", width=width)
    for i in range(num_rows):
        grid.add_row(*(_cell(column, i, "" if is_terminal else "*") for column in columns))
    return grid


def _cell(column: Column, i: int, star: str) -> Any:
    """A cell; the best value is coloured, or has a star, for which other cells have a blank so that digits line up."""
    from rich.text import Text

    is_best = i in column.best
    return Text(
        column.texts[i] + (star if is_best else " " * len(star) * column.is_number), "bold green" if is_best else ""
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and saves the table of each folder. Exits with 3 if a folder has no results."""
    parser = argparse.ArgumentParser("python -m lowvram.table", description=main.__doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", help="a sweep's folder, or that of a run")
    folders = parser.parse_args(arguments).folders
    return max([_show(Path(folder)) for folder in folders] or [_refuse("name the folder of a sweep")])


def _show(folder: Path) -> int:
    if not folder.is_dir():
        return _refuse(f"{folder} is not a folder: name the folder of a sweep or of a run")
    rows = collect(folder)
    if not rows:
        return _refuse(f"{folder} holds no {FILE_NAME}, neither itself nor one folder deeper")
    save(folder, rows)
    print(render(rows))
    return 0


def _refuse(sentence: str) -> int:
    print(shown(sentence), file=sys.stderr)
    return 3
