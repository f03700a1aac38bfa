"""What the folder of a resumed run already holds: a row, metrics, and what was typed. It stays until the run that goes
on has a result or has saved a step, so a resumed run that ends before changes nothing. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lowvram.launch.point import Point
from lowvram.results import row as rows
from lowvram.results.files.durable import write_bytes
from lowvram.results.files.regular import read_regular
from lowvram.results.files.run_folder import SNAPSHOTS, snapshots_in
from lowvram.results.metric_lines import FILE_NAME, LARGEST_BYTES
from lowvram.results.row import Row, Status
from lowvram.runs.hydra_notes import Notes, read_notes, write_notes


@final
@dataclass(frozen=True)
class EarlierLife:
    """The run as its last program left it."""

    folder: Path
    row: Row
    notes: Notes
    metrics: bytes | None  # metrics.jsonl; None: there is none
    snapshots: Collection[str]  # names of files; each has the hash of its bytes

    @classmethod
    def of(cls, point: Point) -> EarlierLife | None:
        """That of a point; None if it isn't resumed, or if the last program left no row."""
        if point.earlier is None:
            return None
        return cls(point.folder, point.earlier, read_notes(point.folder), *files_of(point.folder))

    def stays(self, row: Row) -> bool:
        """Whether it stays in place of `row`, with which the run that went on has ended.

        A final row is replaced only after a step was saved, or by `ok`. One that isn't final is also replaced by
        another result, such as `oom`: a sweep would repeat the point for ever.
        """
        if row["status"] == Status.OK or names_of_snapshots(self.folder) - set(self.snapshots):
            return False
        is_result = rows.is_final(row) and row["status"] != Status.INCOMPATIBLE
        return rows.is_final(self.row) or not is_result

    def put_back(self) -> None:
        """Undo what the run that went on has changed."""
        if read_notes(self.folder) != self.notes:
            write_notes(self.folder, self.notes)
        if self.metrics is not None and bytes_of(self.folder / FILE_NAME) != self.metrics:
            write_bytes(self.folder / FILE_NAME, self.metrics)


def files_of(folder: Path) -> tuple[bytes | None, Collection[str]]:
    """What it has of metrics.jsonl and of snapshots."""
    return bytes_of(folder / FILE_NAME), names_of_snapshots(folder)


def bytes_of(path: Path) -> bytes | None:
    """What is in a file; None if there is none, or if it can't be read: then the run that goes on says so."""
    try:
        return read_regular(path, LARGEST_BYTES)
    except OSError:
        return None


def names_of_snapshots(folder: Path) -> set[str]:
    return {path.name for path in snapshots_in(folder / SNAPSHOTS)}
