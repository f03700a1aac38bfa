"""The folders of runs, sweeps and their points: locked before anything is written, restored if nothing was run.
Imports no torch.

The program locks the folder of a single run or of a sweep; the process that runs a point of a sweep locks the point's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from omegaconf import DictConfig

from lowvram.config.errors import BadInput
from lowvram.config.identity import point_id
from lowvram.launch.last_resort import last_resort
from lowvram.launch.spec import Point
from lowvram.launch.stop import stop_signals
from lowvram.results import row as rows
from lowvram.results.files.claim import Claim, Held
from lowvram.results.files.durable import write_text
from lowvram.results.files.renewal import DEAD_S, LOOK_S, Watch
from lowvram.results.files.run_folder import Kind, has_snapshots, holds_run, other_point
from lowvram.results.row import Row
from lowvram.results.terminal import hydra_quoted, shown_path, tell
from lowvram.runs.hydra_notes import sweep_note

SWEEP_NOTE = "multirun.yaml"


# Folders of single runs that this process took before Hydra made them. Hydra hands nothing on to the job.
_runs: dict[Path, Claim] = {}


def begin_run(folder: Path, resume: str | None, wait_s: float = 0.0) -> Claim:
    """Lock the folder of a single run, before Hydra makes it.

    Args:
        wait_s: how long to wait for another program that writes in it, unless this one is asked to stop.

    Raises:
        BadInput: it holds a run and `resume` is None, another program writes in it, or other files are in it.
    """
    key = "hydra.run.dir" if resume is None else "resume"
    if resume is None:
        check_new(folder)
    claim = claimed(folder, key, wait_s=wait_s)
    _runs[claim.folder] = claim
    return claim


def claimed(
    folder: Path,
    key: str,
    point: str | None = None,
    wait_s: float = 0.0,
    is_known: Callable[[], bool] = lambda: False,
) -> Claim:
    """Take the folder of a run. A program on another machine that holds its lease and can't be asked is watched, unless
    this one is asked to stop.

    Args:
        point, key: as for `Claim`.
        wait_s: how long to wait for the end of another program.
        is_known: asked once before a program is watched: whether it is known to live.

    Raises:
        Held: another program writes there.
        BadInput: see `Claim`.
    """
    until_s, watch, has_told = time.monotonic() + wait_s, Watch(folder.absolute()), False
    while True:
        try:
            return Claim(folder, Kind.RUN, key, point, watch, last_resort.end_taken_over)
        except Held as held:
            if stop_signals() or not (held.is_unsure or time.monotonic() < until_s):
                raise
            if held.is_unsure and not has_told:
                if is_known():
                    raise
                has_told = True
                who = held.who.partition(",")[0]
                what = f"{shown_path(folder)}: {who} has a lease there: watching for up to {DEAD_S:g} s whether"
                tell(f"{what} it is alive", sys.stderr)
        time.sleep(LOOK_S)


def run_at(folder: Path) -> Claim | None:
    """The single run in `folder`, if this process has begun it."""
    return _runs.get(folder)


def end_runs(is_refused: bool) -> None:
    """Unlock the folders of single runs; if the run was refused, remove what this process created in them."""
    for claim in _runs.values():
        claim.undo() if is_refused else claim.release()
    _runs.clear()


@contextmanager
def point_folder(point: Point, is_known: Callable[[], bool] = lambda: False) -> Iterator[tuple[Claim, Row | None]]:
    """Lock the folder of one point of a sweep inside the block; yields the claim and the row that is already there.

    Args:
        is_known: see `claimed`.

    Raises:
        Held: another program runs the point now.
        BadInput: it holds the results of another point, or other files are in it.
    """
    claim = claimed(point.folder, "hydra.sweep.subdir", point.id, is_known=is_known)
    try:
        earlier = rows.read(point.folder)
        check_same_point(earlier, point.id, shown_path(point.folder))
        yield claim, earlier
    finally:
        claim.release()


@final
class SweepFolder:
    """The folder of a sweep, which is locked.

    Raises:
        BadInput: it isn't the folder of a sweep, or other files are in it.
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
        for config in configs:
            subdir, point = str(config.hydra.sweep.subdir), point_id(_root_=config)
            folder = Path(config.hydra.sweep.dir, subdir).resolve()
            check_same_point(rows.read(folder), point, subdir)
            if points.setdefault(folder, point) != point:
                raise other_point("hydra.sweep.subdir", subdir)

    def note(self, config: DictConfig, typed: Sequence[str]) -> None:
        """Write what was typed, for people to read, and the configuration of a point. The program never reads it."""
        write_text(self.path / SWEEP_NOTE, sweep_note(config, typed))

    def forget(self, folder: Path) -> None:
        """Remove the folder that Hydra has made for a point that was stopped before it had a row, if it is empty."""
        if folder not in self._there_before:
            with suppress(OSError):  # it isn't empty
                folder.rmdir()

    def undo(self) -> None:
        """The call was refused: remove what it has made."""
        self._claim.undo()

    def release(self) -> None:
        """Unlock it."""
        self._claim.release()


def check_same_point(earlier: Row | None, point: str, folder: str) -> None:
    """Raises BadInput if `earlier` is the row of another point than `point`."""
    if earlier is not None and earlier["id"] != point:
        raise other_point("hydra.sweep.subdir", folder)


def check_new(folder: Path) -> None:
    """Raises BadInput if the folder already holds a run."""
    if holds_run(folder):
        instead = f"; resume={hydra_quoted(shown_path(folder))} goes on with this one" if has_snapshots(folder) else ""
        raise BadInput("hydra.run.dir", shown_path(folder), f"a folder that holds no run yet{instead}")
