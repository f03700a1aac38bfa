"""`metrics.jsonl` of a run, as its process writes it. A snapshot carries a mark of every line up to its step, so that
lines that are lost later are noticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any, TextIO, final

import torch

from lowvram.core.mesh import all_ranks
from lowvram.loops.session import Events
from lowvram.results.files.durable import naming, write_text
from lowvram.results.files.run_folder import is_same_file
from lowvram.results.metric_lines import FILE_NAME, Lines, Values, mark_of, missing_of, read_lines, to_line

DAMAGED = "metrics.damaged.jsonl"  # the file as it was before its damaged lines were left out


@final
class Metrics:
    """The file of one point, open from `begin` to `close`, in the process that computes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._file: TextIO | None = None
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
        before = read_lines(self._path) if os.path.lexists(self._path) else Lines([], 0)
        is_foreign = any(row[name] != expected[name] for row, expected, name in comparable(before.rows, known))
        if before.num_damaged or is_foreign:
            self._path.replace(self._path.with_name(DAMAGED))
        ours = [] if is_foreign else before.rows
        kept = [row for row in ours if row["step"] <= step]
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
        with naming(self._path):
            self._file.write(to_line(row))
            self._file.flush()

    def sync(self) -> None:
        """Bring all lines to the disk.

        Raises:
            FileNotFoundError: somebody removed the file.
        """
        if self._file is None:
            return
        with naming(self._path):
            os.fsync(self._file.fileno())
        if not is_same_file(self._file.fileno(), self._path):
            raise FileNotFoundError(errno.ENOENT, "its file was removed by somebody", str(self._path))

    def close(self) -> None:
        """With all lines on the disk. Raises as `sync` does."""
        try:
            self.sync()
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file as it is, as after an error."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it couldn't write it can't write now
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


def as_row(step: int, **values: float) -> Values:
    """A row of a snapshot. Raises TypeError if it is none."""
    if not all(isinstance(value, int | float) for value in values.values()):
        raise TypeError(f"a row of other things than numbers: {values}")
    return {"step": index(step), **values}


@final
class MetricsLog:
    """Writes rows to the file, and tells each to whoever watches the run; the context closes the file. Of several ranks
    the first one writes.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path, events: Events) -> None:
        self._path, self._events = folder / FILE_NAME, events
        self._file = Metrics(folder) if all_ranks().is_first else None
        self._untold: list[Values] = []  # nobody watched any more when they were written, or they could not be written
        self._marks: list[list[int]] = []  # of all rows of the run
        self._is_early = False  # whether a snapshot of an early version carries rows that may have been told

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file, after a run that went well with all rows on the disk. Raises FileNotFoundError if somebody
        removed it."""
        if self._file is not None:
            close = self._file.close if kind is None else self._file.drop  # an error is told without waiting for a disk
            close()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a snapshot carries."""
        self._is_early = "unwatched" not in state
        self._untold = [as_row(**row) for row in state.get("untold" if self._is_early else "unwatched", ())]
        marks = state.get("marks")
        self._marks = [] if marks is None else [[index(step), name, line] for step, name, line in marks.tolist()]

    def begin(self, step: int = 0, known: Sequence[Values] = ()) -> list[Values]:
        """Open the file for the rows after `step`; those of later steps, from an earlier process, are removed.

        Args:
            known: rows that the file has if it is this run's; if they differ, its lines are another run's.

        Returns:
            Rows up to `step` that those who watched the earlier process don't know.
        """
        if self._file is None:
            return []
        found = self._file.begin(step, self._untold, known, self._marks)
        if wrong := found.wrong:
            print(f"warning: {self._path}: {wrong}, and are kept in {DAMAGED}")
        if num_missing := found.num_missing:
            lines = f"{num_missing} of {len(self._marks)} lines up to step {step} are missing"
            print(f"warning: {self._path}: {lines}: the snapshot knows them")
        untold, self._untold = found.rows if self._is_early else self._untold, []
        return untold

    def write(self, step: int, values: Mapping[str, float], is_late: bool = False) -> None:
        """Write one row, and tell it.

        Args:
            is_late: whether its step is long over, so that it isn't shown as what happens now.
        """
        row = {"step": step, **values}
        self._untold.append(row)
        self._marks.append(mark_of(row))
        if self._file is not None:
            self._file.write(step, values)
        if self._events("metrics", step=step, values=dict(values), is_late=is_late):
            self._untold.pop()

    def state(self) -> dict[str, Any]:
        """What a snapshot carries. All rows are on the disk then."""
        if self._file is not None:
            self._file.sync()
        return {"unwatched": self._untold, "marks": torch.tensor(self._marks, dtype=torch.int64)}
