"""The columns of a table: values, the same formatted for readers, and which are the best. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowvram.config.texts import shortened
from lowvram.results.metrics import METRICS, Better, Metric
from lowvram.results.row import Row, Status
from lowvram.results.row_fields import at
from lowvram.results.shown import shown

LONGEST_TITLE = 200  # characters


@dataclass(frozen=True)
class Column:
    """One column: its values, the same formatted for readers, and which rows are the best.

    `key`: its name in `BY_IMPORTANCE`.
    """

    key: str
    title: str
    values: tuple[float | str | None, ...]
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()
    is_number: bool = False
    better: Better = Better.NEITHER
    of_training: bool = False  # comparable only after equally many steps


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and the lines to print below them.

    `source`: how the peaks were measured, if all were measured in the same way.
    """

    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    source: str | None = None

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].texts) if self.columns else 0


def words_column(title: str, words: Iterable[str | None]) -> Column:
    """A column of names, reasons or typed values; control characters in them are escaped."""
    values = tuple(word and shown(word) for word in words)
    return Column(title, shortened(shown(title), LONGEST_TITLE), values, tuple(value or "" for value in values))


def metric_column(rows: Sequence[Row], metric: Metric, unit: tuple[str, int]) -> Column:
    """One figure of all rows. `unit`: of memory: its name and its number of bytes."""
    name, num_bytes = unit
    figures = [value_at(row, metric.path) for row in rows]
    values = tuple(value if value is None or not metric.is_size else value / num_bytes for value in figures)
    texts = metric.format.column(values)
    return Column(
        metric.path,
        shortened(shown(metric.title.replace("{unit}", name)), LONGEST_TITLE),
        values,
        texts,
        best_rows(rows, values, texts, metric.better),
        is_number=True,
        better=metric.better,
        of_training=metric.of_training,
    )


def value_at(row: Row, path: str) -> float | None:
    """The number under a dotted path; None where there is none or it isn't finite. A configuration may hold whatever
    another program has put there."""
    value = at(row, path)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def other_scores(rows: Sequence[Row]) -> list[str]:
    """The names of the scores of evaluations that METRICS doesn't list."""
    listed = {metric.path for metric in METRICS}
    return list(dict.fromkeys(name for row in rows for name in row["eval"] if f"eval.{name}" not in listed))


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
