"""The folders of one call of the command line: taken before anything is written, given back as they were if the call is
refused. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from omegaconf import DictConfig, open_dict

from lowvram.config.errors import BadInput
from lowvram.config.identity import point_id
from lowvram.launch.point import Point
from lowvram.results import row as rows
from lowvram.results.files.durable import write_text
from lowvram.results.files.run_folder import Claim, Held, Kind, has_snapshots, holds_run, other_point
from lowvram.results.row import Row
from lowvram.results.terminal import hydra_quoted, shown_path
from lowvram.runs.hydra_notes import sweep_note

SWEEP_NOTE = "multirun.yaml"


@final
class Folders:
    """Those that this program may write in."""

    def __init__(self) -> None:
        self.whole: Claim | None = None  # of the single run, or of the sweep
        self.point: Claim | None = None  # of the sweep's point that runs
        self.held: dict[Path, Held] = {}  # of points that other programs run
        self._there_before: set[Path] = set()  # of the sweep's folder

    def begin_run(self, folder: Path, resume: str | None) -> None:
        """Take the folder of a single run.

        Raises:
            BadInput: it holds a run and isn't to be resumed, somebody else writes in it, or files are in the way.
        """
        key = "hydra.run.dir" if resume is None else "resume"
        if resume is None:
            check_new(folder)
        self.whole = Claim(folder, Kind.RUN, key)

    def begin_sweep(self, config: DictConfig) -> None:
        """Take the folder of a sweep. Raises BadInput as `begin_run`."""
        folder = Path(config.hydra.sweep.dir).absolute()
        self._there_before = set(folder.iterdir()) if folder.is_dir() else set()
        self.whole = Claim(folder, Kind.SWEEP, "hydra.sweep.dir")

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

    def note_sweep(self, config: DictConfig) -> None:
        """What was typed, for people: nothing reads it again."""
        write_text(Path(config.hydra.sweep.dir) / SWEEP_NOTE, sweep_note(config))

    def begin_point(self, point: Point) -> Row | None:
        """Take the folder of one point of a sweep; returns what an earlier program has left there.

        Raises:
            Held: another program runs the point now; it is noted.
            BadInput: it holds the results of another point, or files are in the way.
        """
        try:
            self.point = Claim(point.folder, Kind.RUN, "hydra.sweep.subdir", point.id)
        except Held as held:
            self.held[point.folder] = held
            raise
        earlier = rows.read(point.folder)
        check_same_point(earlier, point.id, shown_path(point.folder))
        return earlier

    def keep_run(self, point: Point) -> None:
        """The folder that Hydra has made for a single run is the one that was taken."""
        if self.whole is None or self.whole.folder != point.folder:  # the user has put other callbacks into Hydra
            self.undo()
            self.begin_run(point.folder, point.config["resume"])

    @property
    def locks(self) -> tuple[int, ...]:
        """Descriptors that whoever writes in the point's folder keeps open."""
        claim = self.point or self.whole
        return () if claim is None else (claim.fd,)

    @property
    def run(self) -> str | None:
        """What the run in the point's folder is called in its snapshots."""
        claim = self.point or self.whole
        return None if claim is None else claim.run

    def end_point(self) -> None:
        """The point of a sweep has ended; others may take its folder."""
        if self.point is not None:
            self.point.release()
        self.point = None

    def forget_point(self, folder: Path) -> None:
        """Of a point of a sweep that Hydra has made a folder for, and that was stopped before anything was known."""
        if self.point is not None:
            self.point.undo()
        if folder not in self._there_before:
            with suppress(OSError):  # somebody has put something there
                folder.rmdir()

    def running(self) -> list[str]:
        """What to tell of points that other programs run."""
        return [
            f"{shown_path(folder)}: {held.who} runs it: type this again to see its row"
            for folder, held in self.held.items()
        ]

    def undo(self) -> None:
        """The call was refused: what it has made is gone again."""
        for claim in (self.point, self.whole):
            if claim is not None:
                claim.undo()

    def release(self) -> None:
        """The call has ended; its results stay."""
        for claim in (self.point, self.whole):
            if claim is not None:
                claim.release()


def check_same_point(earlier: Row | None, point: str, folder: str) -> None:
    """Raises BadInput if a row is another point's than `point`."""
    if earlier is not None and earlier["id"] != point:
        raise other_point("hydra.sweep.subdir", folder)


def check_new(folder: Path) -> None:
    """Refuse to start a run where there is one."""
    if holds_run(folder):
        instead = f"; resume={hydra_quoted(shown_path(folder))} goes on with this one" if has_snapshots(folder) else ""
        raise BadInput("hydra.run.dir", shown_path(folder), f"a folder that holds no run yet{instead}")
