"""One call of the command line: `Call` reacts to Hydra's callbacks. It locks a sweep's folder, checks and launches the
points, and keeps how each ended. Imports no torch.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from lowvram.cli import job, job_process, launchers
from lowvram.cli.errors import unforeseen
from lowvram.cli.hydra_hooks import check_plugins
from lowvram.cli.job import Ending
from lowvram.cli.sweep import SweepBatch, UntilOver
from lowvram.config.compose import check_left_to_us, container
from lowvram.config.errors import Refused
from lowvram.config.settings import is_inline
from lowvram.launch.client import Event
from lowvram.launch.stop import StopConditions, stop_signals
from lowvram.launch.torchrun import Launch
from lowvram.planning.client import request_of
from lowvram.results.row import Row, Status
from lowvram.results.terminal import tell
from lowvram.runs.folders import SweepFolder


@final
class Call:
    """Handles what Hydra reports through hydra_hooks.py.

    Attributes:
        logger: where metrics go, besides files.
        endings: how the points ended, by their index.
        failure: why the launcher failed; `endings` is then incomplete.
    """

    def __init__(self, launch: Launch | None) -> None:
        self._launch = launch
        self._elsewhere = ExitStack()  # the environment and signals of jobs in other processes
        self.is_elsewhere = False
        self.sweep: SweepFolder | None = None
        self._typed: list[str] = []  # for all points of the sweep
        self.logger: Any = None
        self.endings: dict[int, Ending] = {}
        self.failure: str | None = None

    def begin_sweep(self, config: DictConfig) -> None:
        if self._launch is not None:
            hint = "start a sweep without it, and sharding.ranks=2 (or more) for each point"
            raise Refused(f"-m under torchrun: {hint}")
        check_left_to_us(config.hydra)
        check_plugins(config.hydra)
        self.sweep = SweepFolder(Path(config.hydra.sweep.dir))
        self._typed = list(config.hydra.overrides.task)
        self.logger = container(config.get("logger"))
        self.is_elsewhere = launchers.is_elsewhere(config.hydra)
        if self.is_elsewhere:
            self._elsewhere.enter_context(launchers.jobs_elsewhere(config))

    def launch(self, launcher: Launcher, coming: SweepBatch) -> None:
        """Check the representative points of a batch, then run the batch. Raises the first error of either."""
        if not self.is_over():
            self._check(coming)
        if self.is_over():
            return
        batch = UntilOver(coming.batch, self.is_over)
        try:
            jobs = launcher.launch(batch, initial_job_idx=coming.first)
        except (Exception, KeyboardInterrupt) as error:
            if not self.is_elsewhere:
                raise
            self._fail(error)
            return
        for finished in jobs:
            self.end_job(finished)
            _ = finished.return_value  # raises the job's own exception, which Hydra would drop

    def _check(self, coming: SweepBatch) -> None:
        """Build the objects of the representative points in a child process. Raises what is wrong with them."""
        refused: list[str] = []

        def on_event(event: Event) -> None:
            if event["event"] == "row" and event["fields"]["status"] != Status.OK:
                refused.append(event["fields"]["reason"])

        here, configs = job_process.this(), list[DictConfig]()
        for config in coming.to_check():
            job.check_values(config)
            here.server.start()  # after the first, as most mistakes are in what all points share
            configs.append(config)
        here.plans.coming = coming
        if not configs:  # an earlier batch was checked
            return
        if any(map(is_inline, configs)):  # pyright: ignore[reportArgumentType]
            if self.is_elsewhere:
                raise Refused("process=inline: must be child where a launcher starts the processes")
            if len(configs) > 1:
                raise Refused(f"process=inline: must be child for {len(configs)} points, each of which needs a process")
        asked = {"configs": [request_of(config)["config"] for config in configs]}
        here.server.ask("check", asked, on_event, StopConditions(None, stop_signals))
        if stop_signals():
            return
        if refused:
            raise Refused(refused[0])
        assert self.sweep is not None
        self.sweep.check_points(configs)
        if coming.first == 0:
            self.sweep.note(configs[0], self._typed)
        if self.is_elsewhere:
            here.server.stop()
            if coming.first == 0:
                tell(launchers.SIDE_BY_SIDE)

    def _fail(self, error: BaseException) -> None:
        """Note that the launcher raised, or that the user left it. How far its points came is only known from disk."""
        assert self.sweep is not None
        if isinstance(error, Exception):
            self.failure = f"hydra/launcher has failed: {unforeseen(error)}"
            launchers.wait_for_points(self.sweep.path)
        else:
            self.failure = "stopped waiting before all points had ended"

    def end_job(self, job: JobReturn) -> None:
        if job.status is JobStatus.COMPLETED:
            ending = job.return_value
            self.endings[ending.index] = ending

    def row(self, index: int) -> Row | None:
        """The row of a point that has ended; None if it has none."""
        return self.endings[index].read_row() if index in self.endings else None

    def is_over(self) -> bool:
        return bool(stop_signals() or self.failure or self.refusal)

    @property
    def refusal(self) -> Refused | OSError | None:
        """The first error of a point that ends the whole call."""
        return next((ending.refusal for ending in self.endings.values() if ending.refusal), None)

    def leave_hydra(self) -> None:
        """When Hydra has returned: restore signals and the environment."""
        self._elsewhere.close()
