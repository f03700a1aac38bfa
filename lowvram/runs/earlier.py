"""What the folder of a resumed run already holds: a row, metrics, and what was typed. It stays until the run that goes
on has a result or has saved a step, so a resumed run that ends before changes nothing. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import final

from lowvram.launch import events, spec
from lowvram.launch.spec import Point
from lowvram.results import metric_lines
from lowvram.results import row as rows
from lowvram.results.files.durable import write_bytes
from lowvram.results.files.regular import read_regular
from lowvram.results.files.run_folder import SNAPSHOTS, snapshots_in
from lowvram.results.row import Row, Status
from lowvram.runs.hydra_notes import Notes, read_notes, write_notes

CHANGED = (metric_lines.FILE_NAME, events.FILE_NAME, spec.FILE_NAME)


@final
@dataclass(frozen=True)
class EarlierLife:
    """The run as its last program left it."""

    folder: Path
    row: Row | None  # None: it left none, or one of before its last steps
    notes: Notes
    files: Mapping[str, bytes | None]  # what the run that goes on changes at once, by name; None: there is none
    snapshots: Collection[str]  # names of files; each has the hash of its bytes

    @classmethod
    def of(cls, point: Point) -> EarlierLife | None:
        """That of a point; None if it isn't resumed."""
        if not point.is_resumed:
            return None
        files = {name: bytes_of(point.folder / name) for name in CHANGED}
        return cls(point.folder, point.earlier, read_notes(point.folder), files, names_of_snapshots(point.folder))

    def stays(self, row: Row) -> bool:
        """Whether it stays in place of `row`, with which the run that went on has ended.

        A final row is replaced only after a step was saved, or by `ok`. One that isn't final is also replaced by
        another result, such as `oom`: a sweep would repeat the point for ever.
        """
        if self.row is None or row["status"] == Status.OK or names_of_snapshots(self.folder) - set(self.snapshots):
            return False
        is_result = rows.is_final(row) and row["status"] != Status.INCOMPATIBLE
        return rows.is_final(self.row) or not is_result

    def what_is_missing(self) -> str | None:
        """What the metrics have lost that only the row knows: the last evaluation is made after the last snapshot."""
        loss = self.row["loss"]["eval"] if self.row is not None and self.row["status"] == Status.OK else None
        if loss is None:
            return None
        found = metric_lines.lines_of(self.files[metric_lines.FILE_NAME] or b"").rows
        evaluations = (row["loss/eval"] for row in found if row.get("loss/eval") is not None)
        if any(isclose(one, loss, rel_tol=1e-6) for one in evaluations):
            return None
        path = self.folder / metric_lines.FILE_NAME
        return f"warning: {path}: the line of its last evaluation is missing: loss/eval={loss:.6g} in {rows.FILE_NAME}"

    def put_back(self) -> None:
        """Undo what the run that went on has changed."""
        if read_notes(self.folder) != self.notes:
            write_notes(self.folder, self.notes)
        for name, data in self.files.items():
            if data is not None and bytes_of(self.folder / name) != data:
                write_bytes(self.folder / name, data)


def bytes_of(path: Path) -> bytes | None:
    """What is in a file; None if there is none, or if it can't be read: then the run that goes on says so."""
    try:
        return read_regular(path, metric_lines.LARGEST_BYTES)
    except OSError:
        return None


def names_of_snapshots(folder: Path) -> set[str]:
    return {path.name for path in snapshots_in(folder / SNAPSHOTS)}
