"""Weights & Biases: one run per point, recorded by the parent. Needs no torch; imports wandb on first use.

W&B is only a view: if it fails, the point goes on, and `result.json` and `metrics.jsonl` have everything.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowvram.config.secret import text_without_secrets, without_secrets
from lowvram.results.columns import at
from lowvram.results.files.durable import write_text
from lowvram.results.metrics import METRICS
from lowvram.results.row import Row, Status
from lowvram.results.terminal import shown_path

if TYPE_CHECKING:
    import wandb

Tables = Mapping[str, Mapping[str, Sequence[float | str | None]]]  # by name, each column by column

RUN_ID_FILE = "wandb_run_id"
_INIT_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 60.0
_FLUSH_INTERVAL_S = 2.0  # a kill may lose this much of an offline run; W&B's default is 15


class Recorder(ABC):
    """Records the metrics of one point, or the table of a sweep."""

    records = True  # whether it records anything
    notice: str | None = None  # what the user must know: why it is offline, or why it stopped
    address: str | None = None  # the page of an online run
    sync_command: str | None = None  # uploads what was recorded offline

    @classmethod
    @abstractmethod
    def start(
        cls,
        folder: Path,
        logger_cfg: Mapping[str, Any],
        name: str,
        group: str | None,
        config: Mapping[str, Any],
        choices: Mapping[str, str],
        resume_id: str | None = None,
        job_type: str = "point",
    ) -> Recorder:
        """Begins to record a point, or resumes the run `resume_id`.

        `folder` is the point's, `logger_cfg` names `entity` and `project`, `group` is the sweep.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of one step, under the names of `metrics.jsonl`."""

    @abstractmethod
    def show(self, tables: Tables, figures: Mapping[str, Path]) -> None:
        """Records tables, and images, by their names."""

    @abstractmethod
    def finish(self, row: Row) -> None:
        """Records the row's final numbers and its status, and ends."""


class NullRecorder(Recorder):
    """Records nothing: `logger=none`."""

    records = False

    @classmethod
    def start(cls, *_: Any, **__: Any) -> NullRecorder:
        return cls()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def show(self, tables: Tables, figures: Mapping[str, Path]) -> None:
        pass

    def finish(self, row: Row) -> None:
        pass


class Run(Recorder):
    """A run of W&B: `logger=wandb`. Nothing here raises; `notice` says what went wrong."""

    @classmethod
    def start(
        cls,
        folder: Path,
        logger_cfg: Mapping[str, Any],
        name: str,
        group: str | None,
        config: Mapping[str, Any],
        choices: Mapping[str, str],
        resume_id: str | None = None,
        job_type: str = "point",
    ) -> Recorder:
        run_id = resume_id or _new_run_id(folder)
        arguments = {
            "dir": str(folder),
            "entity": logger_cfg["entity"],
            "project": logger_cfg["project"],
            "name": text_without_secrets(name),
            "group": group,
            "job_type": job_type,
            "id": run_id,
            "resume": "allow" if resume_id else None,
            "config": choice_columns(choices) | without_secrets(config),
        }
        try:
            run, notice = _open(arguments)
        except Exception as error:
            silent = NullRecorder()
            silent.notice = f"W&B does not record this point: {first_line(error)}"
            return silent
        if run is None:
            return NullRecorder()
        write_text(folder / RUN_ID_FILE, run_id)
        return cls(run, folder, notice)

    def __init__(self, run: wandb.Run, folder: Path, notice: str | None) -> None:
        self._run = run
        self._folder = folder
        self._is_recording = True
        self.notice = notice
        self.address = None if run.offline else run.url
        self.sync_command = sync_command(folder.parent, shlex.quote(folder.name)) if run.offline else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Without commit W&B writes a step only when the next one comes, and then overwrites the summary.
        self._attempt(lambda: self._run.log(dict(values), step=step, commit=True))

    def show(self, tables: Tables, figures: Mapping[str, Path]) -> None:
        def log() -> None:
            with _waiting_in(self._folder):
                self._run.log({**_tables(tables), **_images(figures)})

        self._attempt(log)

    def finish(self, row: Row) -> None:
        failed = row["status"] != Status.OK
        if row["attempts"]:  # the run began with another number of parts
            self._attempt(lambda: self._run.config.update(without_secrets(row["config"]), allow_val_change=True))
        self._attempt(lambda: self._run.summary.update(without_secrets(final_values(row))))
        self._attempt(lambda: self._run.finish(exit_code=int(failed)))

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self._is_recording:
            return
        try:
            action()
        except Exception as error:
            self._is_recording = False
            self.notice = f"W&B stopped recording: {first_line(error)}"


def choice_columns(choices: Mapping[str, str]) -> dict[str, str]:
    """Columns by which users sort, group and filter runs."""
    return {f"choice.{axis}": option for axis, option in choices.items()}


RECORDERS: dict[str, type[Recorder]] = {"wandb": Run, "none": NullRecorder}


def stored_run_id(folder: Path) -> str | None:
    """The id of the W&B run of this point's folder, for `resume_id`; None if it has no run."""
    file = folder / RUN_ID_FILE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def final_values(row: Row) -> dict[str, float | str]:
    """The summary of a run: status, reason and the known figures of the row, under their names in W&B."""
    values = {key: row[key] for key in ("status", "reason", "disturbed")}
    for metric in METRICS:
        value = at(row, metric.path)
        if metric.wandb_name is not None and value is not None:
            values[metric.wandb_name] = metric.in_wandb(value)
    scores = {
        f"eval/{name}": value for name, value in row["eval"].items()
    }  # a task may have scores that METRICS doesn't list
    return {name: value for name, value in {**values, **scores}.items() if value is not None}


def _open(arguments: dict[str, Any]) -> tuple[wandb.Run | None, str | None]:
    """The run, and what the user must know about it. No run when W&B is disabled."""
    import wandb

    try:
        mode = _mode()
        return (None if mode == "disabled" else _init(mode, arguments)), None
    except Exception as error:
        # W&B's service process still holds the id of the failed attempt, or has died: restart it. Stay offline, so that
        # not every point of a sweep waits for the same timeout.
        with contextlib.suppress(Exception):
            wandb.teardown()
        wandb.setup(settings=wandb.Settings(silent=True, mode="offline"))
        return _init("offline", arguments), f"W&B records offline: {first_line(error)}"


def _mode() -> str:
    """`online` needs an API key (environment, netrc or settings); lowvram never prompts for one."""
    import wandb

    chosen = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
    if chosen in ("disabled", "offline", "dryrun"):
        return "disabled" if chosen == "disabled" else "offline"
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _init(mode: Any, arguments: dict[str, Any]) -> wandb.Run:
    import wandb

    settings = wandb.Settings(
        console="off",  # the progress bar has the terminal
        save_code=False,
        disable_git=True,
        x_disable_stats=True,  # sampled memory misses peaks
        x_disable_meta=True,  # holds the command line, which may hold secrets
        x_transaction_log_flush_interval=_FLUSH_INTERVAL_S,
        init_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_UPLOAD_TIMEOUT_S,
        silent=True,
    )
    return wandb.init(mode=mode, reinit="finish_previous", settings=settings, **arguments)


@contextlib.contextmanager
def _waiting_in(folder: Path) -> Iterator[None]:
    """W&B keeps the data of tables in `folder` until they are uploaded, not in the user's home, unless WANDB_DATA_DIR
    is set."""
    name = "WANDB_DATA_DIR"
    chosen = os.environ.get(name)
    os.environ[name] = chosen or str(folder.resolve())
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[name]


def _tables(tables: Tables) -> dict[str, Any]:
    import wandb

    return {
        name: wandb.Table(columns=list(cells), data=[list(line) for line in zip(*cells.values(), strict=True)])
        for name, cells in tables.items()
    }


def _images(figures: Mapping[str, Path]) -> dict[str, Any]:
    import wandb

    return {name: wandb.Image(str(path)) for name, path in figures.items()}


def _new_run_id(folder: Path) -> str:
    point = re.sub(r"[^\w.-]", "-", folder.resolve().name)[:80]
    return f"{point}-{secrets.token_hex(3)}"


def sync_command(folder: Path, points: str = "*") -> str:
    """The shell command that uploads the offline runs of the points below `folder`. The shell expands the stars.

    A resumed run has several parts; W&B joins them if one command uploads all.
    """
    program = ["wandb"] if shutil.which("wandb") else [sys.executable, "-m", "wandb"]
    parts = [shlex.quote(shown_path(folder)), points, "wandb", "offline-run-*"]
    return f"{shlex.join(program)} sync {'/'.join(parts)}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, without secrets."""
    return text_without_secrets((str(error).strip() or type(error).__name__).splitlines()[0])
