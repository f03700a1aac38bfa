"""The columns of a table: plain values for CSV, the same formatted for readers. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowvram.results.metrics import Better, Metric, Shown
from lowvram.results.row import Row, Status
from lowvram.results.shown import shown


@dataclass(frozen=True)
class Column:
    """One column: plain values for CSV, the same formatted for readers, and which rows are the best."""

    title: str
    values: tuple[float | str | None, ...]
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()
    is_number: bool = False
    better: Better = Better.NEITHER
    is_shown: bool = True  # in the terminal and in Markdown
    is_exported: bool = True  # in CSV
    of_training: bool = False  # comparable only after equally many steps


def words_column(title: str, words: Iterable[str | None], is_exported: bool = True) -> Column:
    """A column of names, reasons or typed values; control characters in them are escaped."""
    values = tuple(word and shown(word) for word in words)
    return Column(shown(title), values, tuple(value or "" for value in values), is_exported=is_exported)


def metric_column(rows: Sequence[Row], metric: Metric, unit: tuple[str, int], kind: Shown) -> Column:
    """One figure of all rows.

    Args:
        unit: of memory: its name and its number of bytes.
        kind: which figures the table shows.
    """
    name, num_bytes = unit
    figures = [value_at(row, metric.path) for row in rows]
    values = tuple(value if value is None or not metric.is_size else value / num_bytes for value in figures)
    texts = metric.format.column(values)
    return Column(
        metric.title.format(unit=name),
        values,
        texts,
        best_rows(rows, values, texts, metric.better),
        is_number=True,
        better=metric.better,
        is_shown=bool(metric.shown_in & kind),
        of_training=metric.of_training,
    )


def at(row: Row, path: str) -> Any:
    """The value under a dotted path; None where there is none."""
    value: Any = row
    for key in path.split("."):
        if value is None:
            return None
        value = value.get(key)
    return value


def value_at(row: Row, path: str) -> float | None:
    """The number under a dotted path; None where there is none or it isn't finite."""
    value = at(row, path)
    return value if value is not None and math.isfinite(value) else None


def best_rows(
    rows: Sequence[Row], values: Sequence[float | None], texts: Sequence[str], better: Better
) -> frozenset[int]:
    """The indices of the rows that show the same text as the best; empty where there is nothing to compare."""
    finished = {
        i: value
        for i, value in enumerate(values)
        if value is not None and rows[i]["status"] == Status.OK and len(rows) > 1
    }
    if not finished or better is Better.NEITHER:
        return frozenset()
    winner = max(finished.values(), key=lambda value: better * value)
    winning_texts = {texts[i] for i, value in finished.items() if value == winner}
    return frozenset(i for i in finished if texts[i] in winning_texts)
