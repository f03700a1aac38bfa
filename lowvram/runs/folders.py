"""The folders of runs, sweeps and their points: taken before anything is written, given back as they were if nothing
was run. Imports no torch.

A lock is a process's: the program holds those of a single run and of a sweep, and whichever process runs a point of the
sweep holds that of the point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from omegaconf import DictConfig, open_dict

from lowvram.config.errors import BadInput
from lowvram.config.identity import point_id
from lowvram.launch.point import Point
from lowvram.results import row as rows
from lowvram.results.files.durable import write_text
from lowvram.results.files.run_folder import Claim, Kind, has_snapshots, holds_run, other_point
from lowvram.results.row import Row
from lowvram.results.terminal import hydra_quoted, shown_path
from lowvram.runs.hydra_notes import sweep_note

SWEEP_NOTE = "multirun.yaml"


_runs: dict[Path, Claim] = {}  # single runs whose folder this process took before Hydra made it


def begin_run(folder: Path, resume: str | None) -> Claim:
    """Take the folder of a single run, before Hydra makes it.

    Raises:
        BadInput: it holds a run and isn't to be resumed, somebody else writes in it, or files are in the way.
    """
    key = "hydra.run.dir" if resume is None else "resume"
    if resume is None:
        check_new(folder)
    claim = Claim(folder, Kind.RUN, key)
    _runs[claim.folder] = claim
    return claim


def run_at(folder: Path) -> Claim | None:
    """The single run in `folder`, if this process has begun it."""
    return _runs.get(folder)


def end_runs(is_refused: bool) -> None:
    """Give the folders of single runs back: as they were before, if nothing was run."""
    for claim in _runs.values():
        claim.undo() if is_refused else claim.release()
    _runs.clear()


@contextmanager
def point_folder(point: Point) -> Iterator[tuple[Claim, Row | None]]:
    """The folder of one point of a sweep is this process's inside the block; with the row that is there already.

    Raises:
        Held: another program runs the point now.
        BadInput: it holds the results of another point, or files are in the way.
    """
    claim = Claim(point.folder, Kind.RUN, "hydra.sweep.subdir", point.id)
    try:
        earlier = rows.read(point.folder)
        check_same_point(earlier, point.id, shown_path(point.folder))
        yield claim, earlier
    finally:
        claim.release()


@final
class SweepFolder:
    """The folder of a sweep, taken before any of its points is composed.

    Raises:
        BadInput: it is no sweep's, or files are in the way.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.absolute()
        self._there_before = set(self.path.iterdir()) if self.path.is_dir() else set()
        self._claim = Claim(self.path, Kind.SWEEP, "hydra.sweep.dir")

    def check_points(self, configs: Sequence[DictConfig]) -> None:
        """Before any of the points of a sweep runs: each folder must be free, or hold results of the same point.

        Raises:
            BadInput: one holds the results of another point, or two points have the same one.
        """
        points: dict[Path, str] = {}
        for number, config in enumerate(configs):
            with open_dict(config.hydra.job):
                config.hydra.job.num = config.hydra.job.id = number
            subdir, point = str(config.hydra.sweep.subdir), point_id(_root_=config)
            folder = Path(config.hydra.sweep.dir, subdir).resolve()
            check_same_point(rows.read(folder), point, subdir)
            if points.setdefault(folder, point) != point:
                raise other_point("hydra.sweep.subdir", subdir)

    def note(self, config: DictConfig) -> None:
        """What was typed, for people: nothing reads it again."""
        write_text(self.path / SWEEP_NOTE, sweep_note(config))

    def forget(self, folder: Path) -> None:
        """Of a point that Hydra has made a folder for, and that was stopped before anything was known."""
        if folder not in self._there_before:
            with suppress(OSError):  # somebody has put something there
                folder.rmdir()

    def undo(self) -> None:
        """The call was refused: what it has made is gone again."""
        self._claim.undo()

    def release(self) -> None:
        """The call has ended; its results stay."""
        self._claim.release()


def check_same_point(earlier: Row | None, point: str, folder: str) -> None:
    """Raises BadInput if a row is another point's than `point`."""
    if earlier is not None and earlier["id"] != point:
        raise other_point("hydra.sweep.subdir", folder)


def check_new(folder: Path) -> None:
    """Refuse to start a run where there is one."""
    if holds_run(folder):
        instead = f"; resume={hydra_quoted(shown_path(folder))} goes on with this one" if has_snapshots(folder) else ""
        raise BadInput("hydra.run.dir", shown_path(folder), f"a folder that holds no run yet{instead}")
