"""One call of the command line. Hydra calls `Call` with each composed point; sweepers hand it batches of points, which
it checks and launches. It keeps how each point ended. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, final

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from lowvram.cli import job, launchers
from lowvram.cli.errors import unforeseen
from lowvram.cli.here import Here, joined
from lowvram.cli.job import Ending, Job
from lowvram.cli.submit import launcher_of
from lowvram.cli.sweep import SweepBatch, UntilOver
from lowvram.config.compose import container
from lowvram.config.errors import Refused, require
from lowvram.config.identity import device_name, name_device
from lowvram.config.settings import is_inline
from lowvram.launch.launcher import Queue
from lowvram.launch.pool import ONE, Slots, cards_in, slots_for
from lowvram.launch.stop import StopConditions, stop_signals
from lowvram.planning.client import request_of
from lowvram.results import row as rows
from lowvram.results.files.late import is_there_in_time
from lowvram.results.row import Row, Status
from lowvram.results.terminal import Progress, tell
from lowvram.runs.folders import SweepFolder
from lowvram.runs.submission import device_in


@final
class Call:
    """Runs the points of one call. In a process that a launcher has started it is unpickled as a `Job`.

    Attributes:
        sweep: the folder of the sweep, if it is one.
        logger: of a sweep: where metrics go, besides files.
        endings: how the points ended, by their index.
        failure: why the launcher failed; `endings` is then incomplete.
    """

    def __init__(self, progress: Progress) -> None:
        self.here = Here(progress)
        self._job = Job(self.here)
        self._elsewhere = ExitStack()  # the environment and signals of jobs in other processes
        self.is_elsewhere = False
        self.sweep: SweepFolder | None = None
        self._typed: list[str] = []  # for all points of the sweep
        self._jobs, self._cards = ONE, list[str]()
        self.logger: Any = None
        self.endings: dict[int, Ending] = {}
        self.failure: str | None = None

    def __call__(self, config: DictConfig) -> Ending:
        """Run one point in this process."""
        ending = self._job(config)
        self.endings[ending.index] = ending
        return ending

    def __reduce__(self) -> tuple[Any, ...]:
        return job_elsewhere, ()

    def begin_sweep(self, config: DictConfig, needs_rows: bool) -> None:
        """Before any point of a sweep is composed: take its folder.

        Args:
            needs_rows: whether the sweeper chooses points by how others have ended.
        """
        self.sweep = SweepFolder(Path(config.hydra.sweep.dir))
        self._typed = list(config.hydra.overrides.task)
        self.logger = container(config.get("logger"))
        self._jobs = str(config.jobs)
        self.is_elsewhere = launchers.is_elsewhere(config.hydra)
        allowed = "1 with another hydra/launcher, which has a key of its own for their number"
        require(self._jobs == ONE or not self.is_elsewhere, "jobs", self._jobs, allowed)
        if self.is_elsewhere:
            self._elsewhere.enter_context(launchers.jobs_elsewhere(config))
        if isinstance(queue := launcher_of(config), Queue):
            chosen = f"launcher={queue.option}"
            if self.is_elsewhere:
                raise Refused(f"hydra/launcher: must be left out with {chosen}, which starts the processes")
            if needs_rows:
                raise Refused(f"hydra/sweeper: must be left out with {chosen}: it waits for the rows of points")
            name_device(device_in(self.sweep.path) or device_name())

    def launch(self, launcher: Launcher, coming: SweepBatch, config: DictConfig, beside: Launcher) -> None:
        """Check the representative points of a batch, then run the batch. Raises the first error of either.

        Args:
            config: of the sweep.
            beside: the launcher for points that run side by side.
        """
        if not self.is_over():
            self._check(coming)
        if self.is_over():
            return
        if self._jobs != ONE and len(self.slots()) > 1:
            if not self.is_elsewhere:
                self.is_elsewhere = True
                self.here.server.stop()
                tell(launchers.SIDE_BY_SIDE)
                self._elsewhere.enter_context(launchers.jobs_elsewhere(config))
            launcher = beside
        batch = UntilOver(coming.batch, self.is_over)
        try:
            jobs = launcher.launch(batch, initial_job_idx=coming.first)
        except (Exception, KeyboardInterrupt) as error:
            if not self.is_elsewhere:
                raise
            self._fail(error)
            return
        for finished in jobs:
            ending = finished.return_value  # raises the job's own exception
            self.endings[ending.index] = ending
        if self.is_elsewhere:
            await_rows(self.endings.values())

    def _check(self, coming: SweepBatch) -> None:
        """Build the objects of the representative points in a child process. Raises what is wrong with them."""
        configs = list[DictConfig]()
        for config in coming.to_check():
            job.check_values(config)
            self.here.server.start()  # after the first, as most mistakes are in what all points share
            configs.append(config)
        self.here.plans.coming = coming
        if not configs:  # an earlier batch was checked
            return
        if any(map(is_inline, configs)):  # pyright: ignore[reportArgumentType]
            if self.is_elsewhere:
                raise Refused("process=inline: must be child where a launcher starts the processes")
            if len(configs) > 1:
                raise Refused(f"process=inline: must be child for {len(configs)} points, each of which needs a process")
        asked = {"configs": [request_of(config)["config"] for config in configs], "jobs": self._jobs}
        answer = self.here.server.ask("check", asked, StopConditions(None, stop_signals))
        if stop_signals():
            return
        if answer and answer["status"] != Status.OK:
            raise Refused(answer["reason"])
        self._cards = cards_in(answer, self._jobs)
        assert self.sweep is not None
        self.sweep.check_points(configs)
        if coming.first == 0:
            self.sweep.note(configs[0], self._typed)
        if self.is_elsewhere:
            self.here.server.stop()
            if coming.first == 0 and self._jobs == ONE:
                tell(launchers.SIDE_BY_SIDE)

    def slots(self) -> Slots:
        """The devices for points that run side by side."""
        return slots_for(self._jobs, self._cards)

    def _fail(self, error: BaseException) -> None:
        """Note that the launcher raised, or that the user left it. How far its points came is only known from disk."""
        assert self.sweep is not None
        if isinstance(error, Exception):
            self.failure = f"hydra/launcher has failed: {unforeseen(error)}"
            launchers.wait_for_points(self.sweep.path)
        else:
            self.failure = "stopped waiting before all points had ended"

    def row(self, index: int) -> Row | None:
        """The row of a point that has ended; None if it has none."""
        return self.endings[index].read_row() if index in self.endings else None

    def is_over(self) -> bool:
        """Whether no more points are to be run."""
        return bool(stop_signals() or self.failure or self.refusal)

    @property
    def refusal(self) -> Refused | OSError | None:
        """The first error of a point that ends the whole call."""
        return next((ending.refusal for ending in self.endings.values() if ending.refusal), None)

    def leave_hydra(self) -> None:
        """When Hydra has returned: restore signals and the environment."""
        self._elsewhere.close()


def await_rows(endings: Iterable[Ending]) -> None:
    """Wait for rows that jobs on other machines have written, and that this one may see late."""
    files = [ending.folder / rows.FILE_NAME for ending in endings if ending.has_row and ending.row is None]
    is_there_in_time(lambda: all(file.exists() for file in files), [file.parent for file in files])


@cache
def job_elsewhere() -> Job:
    """What runs points in a process that a launcher has started."""
    return Job(joined())
