"""csv files whose cells are texts as they stand: "null", "NA" or "007" are no empty cells and no numbers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowvram.config.errors import BadInput
from lowvram.data.csv_quotes import Quoting, check_quotes

ENDINGS = (".csv", ".tsv", ".txt")
SEPARATORS = (",", ";", "\t", "|")
HEAD_BYTES, HEAD_ROWS = 1 << 18, 50  # of a file that show what separates its cells
AS_THEY_STAND: dict[str, Any] = {
    "keep_default_na": False,
    "na_filter": False,
}  # options of datasets' csv reader, which are pandas'


def csv_options(name: str, files: Sequence[Path], num_rows: int | None = None) -> dict[str, Any]:
    """What datasets' csv reader has to be told of these files, which have the same columns.

    Args:
        num_rows: how many rows of each are used; None: all.

    Raises:
        BadInput: the rows of a file don't have as many cells as its header, or a quotation mark joins some. It names
            `data.name`, which is `name`.
    """
    from datasets import Features, Value
    from pandas import read_csv

    plain = [file for file in files if file.suffix.lower() in ENDINGS]
    if not plain:  # compressed ones
        for file in files:
            check_quotes(name, file, Quoting(","), num_rows)
        return AS_THEY_STAND
    separators = {separator_of(name, file) for file in plain}
    if len(separators) > 1:
        shown = " and ".join(map(repr, sorted(separators)))
        raise BadInput("data.name", name, f"files whose cells are separated alike: they have {shown}")
    (separator,) = separators
    for file in files:
        check_quotes(name, file, Quoting(separator), num_rows)
    columns = read_csv(plain[0], sep=separator, nrows=0, index_col=False).columns
    features = Features({str(column): Value("string") for column in columns})
    # Otherwise pandas takes the first column of rows that are longer than the header for names of the rows.
    return {**AS_THEY_STAND, "sep": separator, "index_col": False, "features": features}


def separator_of(name: str, file: Path) -> str:
    """What separates the cells of a file: what cuts its first rows into as many cells as its header has, better two or
    more; a row may lack cells at its end, but not have more."""
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    text = head.decode("utf-8-sig", errors="replace")
    tables = {separator: first_rows(text, separator, is_cut=len(head) == HEAD_BYTES) for separator in SEPARATORS}
    widths = {separator: [len(row) for row in rows] or [0] for separator, rows in tables.items()}
    # Only where nothing cuts the header may the file have a single column.
    cutting = [separator for separator, cells in widths.items() if cells[0] > 1] or list(SEPARATORS)
    fit = [separator for separator in cutting if widths[separator][0] == max(widths[separator])]
    if fit:  # the first one, better of those that cut all rows alike
        return max(fit, key=lambda separator: len(set(widths[separator])) == 1)
    separator = cutting[0]
    num_cells, *others = widths[separator]
    number = next(number for number, width in enumerate(others) if width > num_cells)
    allowed = (
        f"a table whose rows have no more cells than its header: {file} has {num_cells} there, and {others[number]} in"
        f" row {number} ({separator.join(tables[separator][number + 1])[:40]!r}): a cell with a {separator!r} in it"
        " needs quotes around it"
    )
    raise BadInput("data.name", name, allowed)


def first_rows(text: str, separator: str, is_cut: bool) -> list[list[str]]:
    """The cells of the first rows that are whole, without empty rows."""
    reader, rows = csv.reader(text.splitlines(keepends=True), delimiter=separator), list[list[str]]()
    try:
        for row in reader:
            if row:
                rows.append(row)
            if len(rows) == HEAD_ROWS:
                return rows
    except csv.Error:  # a cell larger than csv allows
        return rows
    return rows[:-1] if is_cut else rows
