"""`metrics.jsonl` of a point: a line for every logged step, written at once. Imports no torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, final

from lowvram.results.files.durable import write_text
from lowvram.results.files.run_folder import is_same_file
from lowvram.results.metric_lines import FILE_NAME, Lines, Values, missing_of, read_lines, to_line

DAMAGED = "metrics.damaged.jsonl"  # the file as it was before its damaged lines were left out


@final
class Metrics:
    """The file of one point, open from `begin` to `close`. A point that is resumed or retried begins again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._file: TextIO | None = None
        self._before: tuple[int, Sequence[Values]] | None = None  # the first `step` of `begin`, and the rows after it
        self._last_kinds = set[Any]()  # of the rows of the step after which the point began; they may be written again

    def begin(
        self, step: int, untold: Sequence[Values], known: Sequence[Values] = (), marks: Sequence[Sequence[int]] = ()
    ) -> Lines:
        """Open the file for the steps after `step`; rows of later steps, from an earlier attempt, are removed.

        Args:
            untold: rows up to `step` that an earlier process of the point may not have written.
            known: rows that the file has if it is this run's; if they differ, its lines are another run's.
            marks: of all lines up to `step`, as `mark_of` makes them.

        Returns:
            The rows of `untold` that were indeed missing, and what was wrong with the file.
        """
        self.close()
        before = read_lines(self._path)
        is_foreign = any(row[name] != expected[name] for row, expected, name in comparable(before.rows, known))
        if before.num_damaged or is_foreign:
            self._path.replace(self._path.with_name(DAMAGED))
        ours = [] if is_foreign else before.rows
        kept = [row for row in ours if row["step"] <= step]
        self._before = self._before or (step, [row for row in ours if row["step"] > step])
        there = set(map(kind, kept))
        missing = [row for row in untold if kind(row) not in there]
        rows = sorted([*kept, *missing], key=lambda row: row["step"])
        self._last_kinds = {kind(row) for row in rows if row["step"] == step}
        self._rewrite(rows)
        num_missing = 0 if is_foreign else len(missing_of(marks, rows, step))
        return Lines(missing, before.num_damaged, is_foreign, num_missing)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of one step."""
        assert self._file is not None
        row = {"step": step, **values}
        if kind(row) in self._last_kinds:  # written again after the process died: the new row replaces the old
            self._file.close()
            self._rewrite(old for old in read_lines(self._path).rows if kind(old) != kind(row))
        self._file.write(to_line(row))
        self._file.flush()

    def commit(self) -> None:
        """Flush all lines to the disk.

        Raises:
            FileNotFoundError: somebody removed the file.
        """
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        if not is_same_file(self._file.fileno(), self._path):
            raise FileNotFoundError(errno.ENOENT, "its file was removed by somebody", str(self._path))

    def put_back(self) -> None:
        """Close the file, with the rows of later steps that it had before the first `begin`, instead of new ones."""
        self.close()
        if self._before is not None:
            step, later = self._before
            self._rewrite([*(row for row in read_lines(self._path).rows if row["step"] <= step), *later])
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file = self._file
            try:
                self.commit()
            finally:
                self._file = None
                file.close()

    def _rewrite(self, rows: Iterable[Values]) -> None:
        write_text(self._path, "".join(map(to_line, rows)))
        self._file = self._path.open("a", encoding="utf-8")


def comparable(rows: Iterable[Values], known: Sequence[Values]) -> Iterator[tuple[Values, Values, str]]:
    """Each row, the known row of the same step, and the name of a value that both have."""
    by_step = {expected["step"]: expected for expected in known}
    for row in rows:
        expected = by_step.get(row["step"], {})
        for name in (expected.keys() & row.keys()) - {"step"}:
            yield row, expected, name


def kind(row: Values) -> Any:
    """Two rows of the same kind are of the same step and have the same names of values."""
    return row["step"], *sorted(row)
