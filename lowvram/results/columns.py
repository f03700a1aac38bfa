"""The columns of a table: plain values for CSV, the same formatted for readers. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowvram.results.row import Row, Status
from lowvram.results.shown import shown

Best = Callable[[Iterable[float]], float]


@dataclass(frozen=True)
class Column:
    """One column: plain values for CSV, the same formatted for readers, and which rows are the best."""

    title: str
    values: tuple[float | str | None, ...]
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()
    is_number: bool = False
    better: int = 0  # -1: the smaller, 1: the larger; 0: neither
    is_shown: bool = True  # in the terminal and in Markdown
    is_exported: bool = True  # in CSV


def words_column(title: str, words: Iterable[str | None], is_exported: bool = True) -> Column:
    """Words come from anywhere: names, reasons, values that were typed."""
    values = tuple(word and shown(word) for word in words)
    return Column(shown(title), values, tuple(value or "" for value in values), is_exported=is_exported)


def number_column(
    rows: Sequence[Row],
    title: str,
    path: str,
    best: Best | None,
    num_digits: int = 3,
    divisor: int = 1,
    is_shown: bool = True,
) -> Column:
    found = [value_at(row, path) for row in rows]
    values = tuple(None if value is None else value / divisor for value in found)
    texts = number_texts(values, num_digits)
    marked = frozenset() if best is None else best_rows(rows, values, texts, best)
    better = 0 if best is None else best((-1, 1))
    return Column(title, values, texts, marked, is_number=True, better=int(better), is_shown=is_shown)


def power_column(rows: Sequence[Row], title: str, path: str) -> Column:
    """Numbers that lie powers of ten apart. None is the best: below some size they are all noise."""
    values = tuple(value_at(row, path) for row in rows)
    texts = tuple("" if value is None else f"{value:.1e}" if value else "0" for value in values)
    return Column(title, values, texts, is_number=True)


def value_at(row: Row, path: str) -> float | None:
    value: Any = row
    for key in path.split("."):
        if value is None:
            return None
        value = value.get(key)
    return value if value is not None and math.isfinite(value) else None


def number_texts(values: Sequence[float | None], num_digits: int) -> tuple[str, ...]:
    """As many decimals for all as the smallest needs for its digits, so that the column can be compared."""
    sizes = [abs(value) for value in values if value]
    exponent = math.floor(math.log10(min(sizes))) if sizes else 0
    num_decimals = min(max(num_digits - 1 - exponent, 0), num_digits + 1)
    return tuple("" if value is None else f"{value:.{num_decimals}f}" for value in values)


def best_rows(rows: Sequence[Row], values: Sequence[float | None], texts: Sequence[str], best: Best) -> frozenset[int]:
    """The rows that nobody can tell from the best one; none where there is nothing to compare."""
    finished = {
        i: value
        for i, value in enumerate(values)
        if value is not None and rows[i]["status"] == Status.OK and len(rows) > 1
    }
    if not finished:
        return frozenset()
    winner = best(finished.values())
    winning_texts = {texts[i] for i, value in finished.items() if value == winner}
    return frozenset(i for i in finished if texts[i] in winning_texts)
