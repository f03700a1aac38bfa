"""Hands points to a queue (launcher=slurm or ray), each once: what this program does in place of running them. Imports
no torch.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from omegaconf import DictConfig

from lowvram.compat.hydra import args_parser
from lowvram.config import identity
from lowvram.config.errors import Refused, require
from lowvram.config.schema import build
from lowvram.config.secret import REFUSED, words_without_secrets
from lowvram.config.settings import is_inline
from lowvram.config.words import key
from lowvram.launch.launcher import Launcher, Local, Queue, Queued, Work, job_name, own_token
from lowvram.launch.spec import Point
from lowvram.launch.stop import stop_signals
from lowvram.launch.torchrun import launch_from
from lowvram.results import row as rows
from lowvram.results.files.late import LATE_S, is_shared, is_there_in_time
from lowvram.results.files.run_folder import JOB_LIVES, JOB_LOG, JOB_RECORD, has_snapshots
from lowvram.results.row import Row
from lowvram.results.terminal import hydra_quoted, shown_path, tell
from lowvram.runs.hydra_notes import write_notes
from lowvram.runs.submission import Submission

CONFIG_FLAGS = ("config_dir", "config_path", "config_name")  # of Hydra, which say where options are found
OF_THIS_CALL = ("launcher", "resume", "jobs")  # keys that a job gets with values of its own, or not at all
TOKEN_BYTES = 4


@final
@dataclass(frozen=True)
class Place:
    """Where a point is in the queue.

    Attributes:
        line: for the user.
        is_new: whether it was submitted now.
    """

    job: str
    line: str
    is_new: bool


@final
class Submitter:
    """Submits points to one queue, each that it doesn't hold already."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._jobs: Mapping[str, Queued] = {}  # by their names, when it was last asked
        self._late_s: float | None = None  # until when rows of jobs that have ended may still show themselves

    def held(self, folder: Path) -> Queued | None:
        """The job that the queue holds for a folder; None if it holds none.

        Raises:
            Refused: the queue doesn't answer.
        """
        submission = Submission.read(folder)
        if submission is None or submission.queue != self._queue.option:
            return None
        if submission.job_name not in self._jobs:  # submitted, or started again by hand, after it was asked
            self._jobs = {job.name: job for job in self._queue.jobs()}
        return self._jobs.get(submission.job_name)

    def late_row(self, folder: Path) -> Row | None:
        """The row of a point without one, if its job has left the queue: another machine has written it, and this one
        may see it late. All points together are waited for once.

        Raises:
            Refused: the queue doesn't answer.
        """
        if Submission.read(folder) is None or self.held(folder) is not None:
            return None
        if self._late_s is None:
            self._late_s = time.monotonic() + LATE_S
            if is_shared(folder):
                what = f"{shown_path(folder)}: its {self._queue.label} job has ended"
                tell(f"{what}: waiting up to {LATE_S:g} s for the row, which this machine may see late")
        is_there_in_time(lambda: stop_signals() > 0 or rows.read(folder) is not None, [folder], self._late_s)
        return rows.read(folder)

    def submit(self, point: Point, words: Sequence[str]) -> Place:
        """Submit a point whose folder this program has claimed, unless the queue holds it.

        Args:
            words: what was typed for the point.

        Raises:
            Refused: the queue doesn't take it, or holds a job for another configuration of it; or another queue may
                still hold it.
        """
        folder, label = point.folder, self._queue.label
        before = Submission.read(folder)
        if before is not None and before.queue != self._queue.option:
            check_ended(folder, before)
            before = None
        held = self.held(folder)
        if before is not None and held is not None:
            if before.id != point.id:
                what = f"{label} job {held.id} ({held.state}) runs another configuration in {shown_path(folder)}"
                raise Refused(f"{what}: wait for its end, cancel it, or choose another folder")
            if before.job is None:  # the program that submitted it has died
                replace(before, job=held.id).write(folder)
            return self.place(point.name, held)
        job = self._submit(point, words)
        line = f"{point.name}: {how_before(folder, before, self._queue)}submitted as {label} job {job}"
        return Place(job, line, is_new=True)

    def place(self, name: str, job: Queued) -> Place:
        """That of a point which the queue holds already."""
        return Place(job.id, f"{name}: {self._queue.label} job {job.id} is {job.state}", is_new=False)

    def _submit(self, point: Point, words: Sequence[str]) -> str:
        folder, token = point.folder, secrets.token_hex(TOKEN_BYTES)
        command = [*program(), *flags(), *words_of_job(words, folder, self._queue.variables)]
        submission = Submission(
            queue=self._queue.option,
            token=token,
            job_name=job_name(point.name, token),
            id=point.id,
            name=point.name,
            index=point.index,
            logged=dict(point.logged),
            device=identity.device_in_ids(),
            sweep=point.sweep,
        )
        if not has_snapshots(folder):  # else they are those of the run that goes on
            write_notes(folder, point.notes)
        (folder / JOB_LIVES).unlink(missing_ok=True)
        submission.write(folder)
        job = self._queue.submit(Work(submission.job_name, token, folder, command, Path.cwd()))
        replace(submission, job=job).write(folder)
        return job


def launcher_of(config: DictConfig) -> Launcher:
    """Who runs the points of a configuration. Raises BadInput for wrong values."""
    launcher = build(config.launcher, "launcher")
    allowed = "a launcher of lowvram's: choose launcher=OPTION"
    require(isinstance(launcher, Launcher), "launcher._target_", config.launcher["_target_"], allowed)
    return launcher


def check_launcher(config: DictConfig) -> None:
    """Raises BadInput or Refused if the points of a configuration can't be handed to the queue that it names."""
    launcher = launcher_of(config)
    if isinstance(launcher, Local) or own_token():  # a job, whose user may have another launcher in conf/local
        return
    many = f"1 with launcher={launcher.option}: {launcher.label} decides how many points run at the same time"
    require(str(config.jobs) == "1", "jobs", config.jobs, many)
    require(not is_inline(config), "process", config.process, f"child where {launcher.label} starts the program")
    if launch_from() is not None:
        how = "type it without, and sharding.ranks=2 (or more) for several ranks"
        raise Refused(f"launcher={launcher.option} under torchrun: {how}")
    launcher.check()


def check_ended(folder: Path, before: Submission) -> None:
    """Raises Refused unless a job of another queue has left a final row: that queue isn't asked."""
    row: Row | None = rows.read(folder)
    if row is None or not rows.is_final(row):
        job = f"launcher={before.queue}, job {before.job or before.job_name}"
        how = f"type that launcher to collect it, or remove {shown_path(folder / JOB_RECORD)} once the job is gone"
        raise Refused(f"{shown_path(folder)}: its point was submitted with {job}: {how}")


def how_before(folder: Path, before: Submission | None, queue: Queue) -> str:
    """For a line: how an earlier job has left the point; empty if there was none."""
    if before is None:
        return ""
    row: Row | None = rows.read(folder)
    job = f"{queue.label} job {before.job}" if before.job else "its job"
    if row is None:
        log = folder / JOB_LOG
        known = [queue.how_ended(before.job or before.job_name), f"see {shown_path(log)}" if log.exists() else ""]
        about = "; ".join(filter(None, known))
        return f"{job} has ended without a row{f' ({about})' if about else ''}, "
    return f"{job} has ended, {row['status']}: {row['reason']}, "


def program() -> list[str]:
    """The command that starts this program, wherever a job runs."""
    return [sys.executable, os.path.abspath(sys.argv[0])]  # noqa: PTH100  # links stay, as those of environments


def flags() -> list[str]:
    """Hydra's flags that were typed and say where options are found."""
    known, _ = args_parser().parse_known_args(sys.argv[1:])
    typed = {name: getattr(known, name) for name in CONFIG_FLAGS}
    return [f"--{name.replace('_', '-')}={value}" for name, value in typed.items() if value]


def words_of_job(words: Sequence[str], folder: Path, variables: str) -> list[str]:
    """The words with which a job runs a point.

    Args:
        words: what was typed for it.
        variables: how a job gets a variable of the environment.

    Raises:
        Refused: one of them is a secret, which a script would show.
    """
    kept = [word for word in words if key(word).partition(".")[0] not in OF_THIS_CALL]
    for word, shown in zip(kept, words_without_secrets(kept), strict=True):
        if REFUSED in shown:
            how = f"type ${{oc.env:NAME}}, the name of a variable of the environment; {variables}"
            raise Refused(f"{key(word)}: a secret can't be typed for a job, whose script others may read: {how}")
    return [f"resume={hydra_quoted(str(folder))}", *kept]
