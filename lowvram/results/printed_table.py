"""A table as text: for a terminal, as narrow as it is, for a file or a pipe, and in Markdown. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from lowvram.results.columns import Column, Table
from lowvram.results.csv_file import FILE_NAME as CSV_FILE
from lowvram.results.metrics import importance
from lowvram.results.shown import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

_PLAIN_WIDTH = 10_000  # of the output if it isn't a terminal, so that nothing is wrapped
_BORDER = 3  # characters between a column and the next


def to_markdown(table: Table) -> str:
    """The table in Markdown; the best value of each column is in bold."""
    titles = [_escaped(column.title) for column in table.columns]
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    cells = [
        [
            f"**{_escaped(column.texts[i])}**" if i in column.best else _escaped(column.texts[i])
            for column in table.columns
        ]
        for i in range(table.num_rows)
    ]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *cells)]
    below = [*_source_line(table), *table.notes]
    notes = ["", *(f"- {_escaped(note)}" for note in below)] if below else []
    return "\n".join([*lines, *notes]) + "\n"


def _escaped(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|"})
    return one_line(text).translate(special)


def _source_line(table: Table) -> Iterator[str]:
    if table.source:
        yield f"peak: {table.source}"


def to_text(table: Table, stream: TextIO | None = None) -> str:
    """The table and its notes as text for `stream` (default: standard output), coloured for a terminal.

    A terminal that is too narrow for all columns shows the most important ones; a line below names the others.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    columns = fitting(table.columns, console.width)
    with console.capture() as capture:
        console.print(_grid(columns, table.num_rows, console))
        for line in (*_legend(table, columns, console.is_terminal), *table.notes):
            console.print(Text(line), soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _legend(table: Table, columns: Sequence[Column], is_terminal: bool) -> Iterator[str]:
    """What the table's reader must know of all its rows."""
    yield from _source_line(table)
    if not is_terminal and any(column.best for column in table.columns):
        yield "* the best of its column"
    if dropped := [column.title for column in table.columns if column not in columns]:
        yield f"also in {CSV_FILE}: {', '.join(dropped)}"


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The first column, which names the rows, and the most important others that fit into `width`, in their order."""
    room = width - 1 - sum(_width(column, width) + _BORDER for column in columns[:1])
    kept = {0: True}
    for i in sorted(range(1, len(columns)), key=lambda i: importance(columns[i].key)):
        needed = _width(columns[i], width) + _BORDER
        kept[i] = needed <= room
        room -= needed * kept[i]
    return [column for i, column in enumerate(columns) if kept[i]]


def _width(column: Column, console_width: int) -> int:
    """Characters of a column: its title, which is one line, or its longest value. Names that are longer than half of
    the terminal are folded."""
    return max(len(column.title), min(max(map(len, column.texts), default=0), console_width // 2))


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
