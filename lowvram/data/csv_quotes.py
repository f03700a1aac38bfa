"""Quotation marks of csv files: one that doesn't enclose a cell would make whole rows a part of one cell."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import BadInput

SAMPLE_ROWS = 10_000  # of a file, that show what its columns hold
REPEATED = 3  # more lines than that may show by themselves that they are rows
SHOWN_LETTERS = 60  # of a line, in a message
BLOCK_BYTES = 1 << 20
LARGEST_CELL = (1 << 31) - 1  # bytes; Python's csv allows 128 KiB unless told
HINT = (
    "a cell that begins with a quotation mark of its own needs quotes around it and its own marks doubled"
    ' ("""Yes"", he said"), as csv writers do it; json and parquet files need neither'
)


@final
@dataclass(frozen=True)
class Quoting:
    """How a file's cells are separated and quoted, and how its letters are encoded."""

    separator: str
    mark: str = '"'
    escape: str | None = None
    is_doubled: bool = True  # a mark in a quoted cell is written twice
    is_space_skipped: bool = False
    encoding: str = "utf-8-sig"

    def rows(self, lines: Iterable[str]) -> Any:
        """A reader that raises csv.Error for letters behind a quoted cell, and for a quoted cell that doesn't end."""
        return csv.reader(
            lines,
            delimiter=self.separator,
            quotechar=self.mark,
            escapechar=self.escape,
            doublequote=self.is_doubled,
            skipinitialspace=self.is_space_skipped,
            strict=True,
        )

    def unquoted(self, line: str) -> list[str]:
        """The cells of a line if quotation marks meant nothing."""
        return line.rstrip("\r\n").split(self.separator)


def quoting_of(config: Any) -> Quoting | None:
    """The quoting that datasets' options of a csv reader say; None for files that aren't read by quotes and lines."""
    if len(config.sep) != 1 or config.quoting == csv.QUOTE_NONE or config.comment or config.lineterminator:
        return None
    encoding, spaces = config.encoding or "utf-8-sig", config.skipinitialspace
    return Quoting(config.sep, config.quotechar, config.escapechar, config.doublequote, spaces, encoding)


@final
@dataclass
class Columns:
    """What the columns of a file hold, as the rows that take one line each show it, quotation marks included."""

    num_columns: int
    num_rows: int = 0
    values: list[set[str]] = field(default_factory=list)
    are_numbers: list[bool] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return self.num_rows >= SAMPLE_ROWS

    def add(self, cells: Sequence[str] = ()) -> None:
        """Count a row in, if it has a cell for each column."""
        if self.is_known or len(cells) != self.num_columns:
            return
        self.values = self.values or [set() for _ in cells]
        self.are_numbers = self.are_numbers or [True for _ in cells]
        self.num_rows += 1
        for column, cell in enumerate(cells):
            self.values[column].add(cell)
            self.are_numbers[column] = self.are_numbers[column] and is_number(cell)

    def fit(self, rows: list[list[str]]) -> bool:
        """Whether these rows look like rows of their own, by one of their columns: each has there a number or a value
        that other rows of the file have there, or, where they are more than the others, they repeat their values."""
        return any(self.fits(number, [row[number] for row in rows]) for number in range(self.num_columns))

    def fits(self, number: int, cells: list[str]) -> bool:
        """Whether such a column of rows looks like that of the others."""
        are_many = len(cells) > max(REPEATED, self.num_rows)
        values, are_numbers = (self.values[number], self.are_numbers[number]) if self.values else (set[str](), are_many)
        are_alike = all(cell in values or (are_numbers and is_number(cell)) for cell in cells)
        return all(cells) and (are_alike or (are_many and 2 * len(set(cells)) <= len(cells)))


@final
@dataclass(frozen=True)
class Swallowed:
    """Lines of a file that one quotation mark joins."""

    first: int  # the number of the first line; the file's first is 1
    lines: list[str]

    @property
    def sentence(self) -> str:
        last = self.first + len(self.lines) - 1
        what = (
            f"makes one cell of the rows up to line {last}" if last > self.first else "isn't closed where the cell ends"
        )
        return f"the one in line {self.first} ({self.lines[0].strip()[:SHOWN_LETTERS]!r}) {what}"


def check_quotes(name: str, file: Path, quoting: Quoting, num_rows: int | None) -> None:
    """Raises BadInput for a file in which a quotation mark doesn't enclose a cell. It names the line.

    Args:
        name: the value of `data.name`.
        num_rows: how many rows are used; None: all.
    """
    if not has_mark(file, quoting.mark):
        return
    with text_of(file, quoting.encoding) as lines, large_cells():
        swallowed = first_swallowed(lines, quoting, num_rows)
    if swallowed is not None:
        allowed = f"a table in which quotation marks enclose whole cells: of {file} {swallowed.sentence}: {HINT}"
        raise BadInput("data.name", name, allowed)


def first_swallowed(lines: Iterable[str], quoting: Quoting, num_rows: int | None) -> Swallowed | None:
    """The first lines that a mark joins although it doesn't enclose a cell; None: there are none.

    A mark that is closed by another one at a cell's end looks like a quoted cell. Then the lines that it joins each
    have as many cells as the header, and a column of theirs holds what that column of other rows holds.
    """
    columns, doubtful = Columns(0), list[tuple[Swallowed, list[list[str]]]]()
    row_lines = RowLines(lines, quoting.mark)
    rows = quoting.rows(row_lines)
    try:
        for row in islice(rows, None if num_rows is None else num_rows + 1):  # and the header
            if not columns.num_columns:
                columns = Columns(len(row))
            elif len(row_lines.taken) == 1:
                columns.add(quoting.unquoted(row_lines.taken[0]))
            elif all(line.count(quoting.separator) == columns.num_columns - 1 for line in row_lines.taken):
                swallowed, naive = row_lines.joined(), [quoting.unquoted(line) for line in row_lines.taken]
                if len(row) != columns.num_columns or (columns.is_known and columns.fit(naive)):
                    return swallowed
                doubtful += [] if columns.is_known else [(swallowed, naive)]
            row_lines.taken.clear()
            row_lines.is_plain_skipped = columns.is_known and num_rows is None
    except csv.Error:
        return row_lines.joined()
    return next((swallowed for swallowed, naive in doubtful if columns.fit(naive)), None)


@final
class RowLines:
    """The lines of a file for a reader of rows, which keeps those of the row that is being read in `taken`."""

    def __init__(self, lines: Iterable[str], mark: str) -> None:
        self.lines, self.mark = lines, mark
        self.taken, self.number = list[str](), 0  # the number of the last line, from 1
        self.is_plain_skipped = False  # whether rows without a mark are left out: that is faster

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.number += 1
            if not self.is_plain_skipped or self.taken or self.mark in line:
                self.taken.append(line)
                yield line

    def joined(self) -> Swallowed:
        """The lines that are being read as one row."""
        return Swallowed(self.number - len(self.taken) + 1, list(self.taken))


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The file's bytes, decompressed as its ending says."""
    from fsspec.implementations.local import LocalFileSystem  # `datasets` brings it

    with LocalFileSystem().open(str(file), "rb", compression="infer") as stream:
        yield stream


@contextmanager
def text_of(file: Path, encoding: str) -> Iterator[Iterable[str]]:
    """The file's lines with their ends. Letters that can't be decoded are replaced: `datasets` refuses them."""
    with opened(file) as stream:
        yield TextIOWrapper(stream, encoding, errors="replace", newline="")


def has_mark(file: Path, mark: str) -> bool:
    with opened(file) as stream:
        return any(mark.encode() in block for block in iter(lambda: stream.read(BLOCK_BYTES), b""))


@contextmanager
def large_cells() -> Iterator[None]:
    """Lets Python's csv read cells of any size."""
    usual = csv.field_size_limit(LARGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(usual)
