"""The table of a sweep: a view rebuilt from the `result.json` of its points. Needs no torch.

Nothing else is kept, so there is no shared file that two writers could spoil.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from lowvram.results.columns import Column, Table, metric_column, other_scores, value_at, words_column
from lowvram.results.csv_file import FILE_NAME as CSV_FILE
from lowvram.results.csv_file import to_csv, to_json_lines
from lowvram.results.files.durable import write_text
from lowvram.results.files.marker import MARKER, point_of
from lowvram.results.files.run_folder import is_running
from lowvram.results.metrics import (
    FILE_SIZE,
    LEAST_VRAM,
    METRICS,
    PADDING,
    PEAK,
    SLOW_STEP,
    Better,
    Shown,
    number_texts,
    score,
)
from lowvram.results.printed_table import to_markdown, to_text
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
)
from lowvram.results.row_fields import at
from lowvram.results.shown import one_line, shown

SOURCES = {
    "cuda_allocator": "CUDA allocator",
    "tensor_ledger": "tensor bytes on CPU",
    "process": "growth of the process",
}
_LARGEST_IN_MIB, _SMALLEST_IN_GIB = 0.1 * GIB, 0.01 * GIB


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


def tell_missing(folder: Path) -> None:
    """Name the points of a sweep that have no row, and that no program runs now: what is shown lacks them."""
    for point in sorted(path.parent for path in folder.glob(f"*/{MARKER}")):
        if point_of(point) is not None and not (point / FILE_NAME).exists() and not is_running(point):
            why = "the program died before it wrote one, or somebody has removed it: the same command runs it again"
            print(shown(f"{point / FILE_NAME} is missing, so this point is left out: {why}"), file=sys.stderr)


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
        words_column("largest", (at(row, "plan.solved") for row in rows)),
        *_figures(rows),
    )
    sources = peak_sources(rows)
    return Table(
        tuple(column for column in columns if any(column.texts)),
        tuple(map(one_line, _notes(rows, kept))),
        sources[0] if len(sources) == 1 else None,
    )


def peak_sources(rows: Sequence[Row]) -> list[str]:
    """How the peaks were measured, each way once. Peaks that were measured in different ways can't be compared."""
    return list(dict.fromkeys(source for row in rows if (source := _source(row))))


def _source(row: Row) -> str | None:
    return SOURCES.get(row["memory"]["source"])


def _figures(rows: Sequence[Row]) -> Iterator[Column]:
    """The columns of the figures in METRICS, some followed by columns of words."""
    unit, kind, has_budget = memory_unit(rows), _kind(rows), _has_budget(rows)
    is_comparable = len(peak_sources(rows)) <= 1
    beside = {
        PEAK: [words_column("memory source", () if is_comparable else map(_source, rows))],
        LEAST_VRAM: [words_column("fits", (_fits(row) for row in rows) if has_budget else ())],
        SLOW_STEP: [
            words_column("p05-p95", _spreads(rows)),
            words_column("disturbed", ("yes" if row["disturbed"] else None for row in rows)),
        ],
    }
    for metric in METRICS:
        if metric.path == PEAK and not is_comparable:
            metric = replace(metric, better=Better.NEITHER)
        if metric.shown_in & kind:
            yield metric_column(rows, metric, unit)
        yield from beside.get(metric.path, ())
    for name in other_scores(rows):
        yield metric_column(rows, score(name), unit)


def _kind(rows: Sequence[Row]) -> Shown:
    """Which figures a table shows. Beside measured figures one planned number is shown, unless there is a budget."""
    kind = Shown.TABLE
    if _is_plan(rows):
        kind |= Shown.TABLE_OF_PLANS
    if _has_budget(rows):
        kind |= Shown.TABLE_WITH_BUDGET
    if any(value_at(row, PADDING) for row in rows):
        kind |= Shown.TABLE_WITH_PADDING
    if len({value_at(row, FILE_SIZE) for row in rows} - {None}) > 1:
        kind |= Shown.TABLE_OF_FILES
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
            yield one_line(f"{name}: {row['status'] or 'unfinished'}: {row['reason'] or 'no reason is known'}")
        if (row["plan"] or {}).get("reason"):
            yield one_line(f"{name}: {row['plan']['reason']}")
        if attempts := attempts_text(row):
            yield f"{name}: {attempts}"
        if retries := row["memory"]["alloc_retries"]:
            yield f"{name}: {retries} allocations succeeded only after free memory was returned to the driver"
        if beyond := beyond_tensors_text(row):
            yield f"{name}: {beyond}"
        if row["disturbed"]:
            yield one_line(f"{name}: disturbed: {row['disturbed']}")
        if others := reruns_text(row):
            yield one_line(f"{name}: {others}")
        if row["time"]["is_cut"]:
            yield f"{name}: its window was cut short by measure.max_seconds, after {row['time']['steps']} steps"
        if (row["fidelity"] or {}).get("reason"):
            yield one_line(f"{name}: its fidelity is not known: {row['fidelity']['reason']}")
        if row["semantics_changed"]:
            yield one_line(f"{name}: semantics changed: {row['semantics_changed']}")
        if is_mixed or row["id"] in kept:
            yield f"{name}: measured at {_revision(row)}"


def _revision(row: Row) -> str:
    sha, is_dirty = row["provenance"]["git_sha"], row["provenance"]["dirty"]
    return f"{(sha or 'an unknown revision')[:19]}{' with uncommitted changes' if is_dirty else ''}"


def save(folder: str | Path, rows: Sequence[Row]) -> None:
    """Writes `table.md`, `table.csv` and `rows.jsonl` into the sweep's folder, each in one move."""
    write_text(Path(folder) / "table.md", to_markdown(build(rows)))
    write_text(Path(folder) / CSV_FILE, to_csv(rows))
    write_text(Path(folder) / "rows.jsonl", to_json_lines(rows))


def render(rows: Sequence[Row], stream: TextIO | None = None, kept: Collection[str] = frozenset()) -> str:
    """The table and its notes as text for `stream` (default: standard output), coloured for a terminal."""
    return to_text(build(rows, kept), stream)


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
    tell_missing(folder)
    return 0


def _refuse(sentence: str) -> int:
    print(shown(sentence), file=sys.stderr)
    return 3
