"""Weights & Biases: one run per point, recorded by the parent. Needs no torch; imports wandb on first use.

Each row is logged at once with its `step`, which is the axis of all metrics: W&B's own step only counts rows, so an
evaluation, which is a row of its own, never meets a step that W&B has already closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from lowvram.config import wandb_environment
from lowvram.config.parent_settings import MODEL
from lowvram.config.secret import text_without_secrets, without_secrets
from lowvram.results.files import manifest
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import SHORT_BYTES, read_regular
from lowvram.results.loggers.logger import LoggedRun, Logger, config_of, final_values, reason
from lowvram.results.row import Row, Status
from lowvram.results.terminal import shown_path

if TYPE_CHECKING:
    import wandb

Tables = Mapping[str, Mapping[str, Sequence[float | str | None]]]  # by name, each column by column

RUN_ID_FILE = "wandb_run_id"
RUN_ID = re.compile(r"[^/\\#?%:\s]{1,128}")  # as W&B takes it
STEP, AXIS = "step", "moment"  # the axes of figures, and of curves
_INIT_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S, _MODEL_TIMEOUT_S = 60.0, 3600.0  # that the end of a run waits for an upload
_FLUSH_INTERVAL_S = 2.0  # a kill may lose this much of an offline run; W&B's default is 15
_SAMPLING_INTERVAL_S = 5.0  # of W&B's system metrics; its default of 15 is too long for short runs


@final
class WandbRun(Logger):
    """A run of W&B: `logger=wandb`."""

    title = "W&B"

    @classmethod
    def start(cls, run: LoggedRun) -> WandbRun | None:
        resume_id = stored_run_id(run.folder)
        run_id = resume_id or _new_run_id(run.folder)
        opened, why_offline = _open(run, run_id, resume_id is not None)
        if opened is None:
            return None
        file, lost = run.folder / RUN_ID_FILE, None
        if resume_id is None and file.is_file():
            lost = f"{shown_path(file)} was changed or damaged: this run goes on as {opened.id}, a new run of W&B"
        write_text(file, with_checksum(opened.id))  # an agent of W&B has chosen another id
        return cls(opened, run, "; ".join(filter(None, [why_offline, lost])) or None)

    def __init__(self, opened: wandb.Run, run: LoggedRun, why_offline: str | None) -> None:
        self._run, self._logged, self._why_offline = opened, run, why_offline
        self._axes = dict[str, str]()  # of each metric
        self._known_step = self._last_step = 0  # the last one of earlier processes, and the last one

    @property
    def notes(self) -> list[str]:
        return [note for note in (self._why_offline, None if self._run.offline else self._run.url) if note]

    @property
    def upload(self) -> str | None:
        folder = self._logged.folder
        return sync_command(folder.parent, shlex.quote(folder.name)) if self._run.offline else None

    def go_on(self, run: LoggedRun) -> None:
        """W&B takes its system metrics from one process, so another one is another part of the same run."""
        if run.pid != self._logged.pid:
            self._run.finish()
            self._run = _init("offline" if self._run.offline else "online", run, self._run.id, is_resumed=True)
            self._logged, self._axes, self._known_step = run, {}, self._last_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._known_step:
            self._last_step = step
            self._log(STEP, {STEP: step, **values})

    def log_curves(self, section: str, curves: Mapping[str, Sequence[float]]) -> None:
        axis, names = f"{section}/{AXIS}", [f"{section}/{name}" for name in curves]
        for number, values in enumerate(zip(*curves.values(), strict=True)):
            self._log(axis, {axis: number, **dict(zip(names, values, strict=True))})

    def _log(self, axis: str, values: Mapping[str, float]) -> None:
        for name in values.keys() - self._axes.keys():
            self._axes[name] = axis
            self._run.define_metric(name, step_metric=None if name == axis else axis)
        self._run.log(dict(values))

    def show(self, tables: Tables, figures: Mapping[str, Path]) -> None:
        """Log tables, and images, by their names."""
        with _waiting_in(self._logged.folder):
            self._run.log({**_tables(tables), **_images(figures)})

    def finish(self, row: Row) -> None:
        is_ok = row["status"] == Status.OK
        # What is known only now: the number of parts that fitted, the allocator that `vram` chose.
        config = without_secrets(config_of(row["config"], row)) if self._logged.config else {}
        self._run.config.update(config, allow_val_change=True)
        self._run.summary.update(without_secrets(final_values(row)))
        try:
            if is_ok and self._logged.settings.artifact == MODEL:
                self._log_model(final_values(row))
        finally:
            self._run.finish(exit_code=int(not is_ok))

    def _log_model(self, values: Mapping[str, float | str]) -> None:
        """The files that lowvram has written to `model/`, and no others that may lie there."""
        import wandb

        folder = self._logged.folder / MODEL
        exported = manifest.read(folder) if folder.is_dir() else None
        if exported is None:  # only mode=train trains
            return
        artifact = wandb.Artifact(f"{MODEL}-{self._run.id}", type=MODEL, metadata=dict(values))
        for name in (*exported.files, manifest.NAME):
            artifact.add_file(str(folder / name), name=name, policy="immutable", skip_cache=True)  # copies nothing
        self._run.log_artifact(artifact)


def stored_run_id(folder: Path) -> str | None:
    """The id of the W&B run of this point's folder; None if it has no run, or the file was damaged. An early version of
    lowvram wrote no checksum."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = read_regular(folder / RUN_ID_FILE, SHORT_BYTES).decode()
        run_id, *more = text.splitlines() or [""]
        is_whole = bool(RUN_ID.fullmatch(run_id)) and (not more or with_checksum(run_id) == text)
        return run_id if is_whole else None
    return None


def with_checksum(run_id: str) -> str:
    """The content of the file: the id, and its checksum in a line of its own."""
    return f"{run_id}\ncrc32 {zlib.crc32(run_id.encode()):08x}\n"


def _open(run: LoggedRun, run_id: str, is_resumed: bool) -> tuple[wandb.Run | None, str | None]:
    """The run, and why it is offline if it shouldn't be. No run when W&B is disabled."""
    import wandb

    try:
        mode = _mode()
        return (None if mode == "disabled" else _init(mode, run, run_id, is_resumed)), None
    except Exception as error:
        # W&B's service process still holds the id of the failed attempt, or has died: restart it. Stay offline, so that
        # not every point of a sweep waits for the same timeout.
        with contextlib.suppress(Exception):
            wandb.teardown()
        wandb.setup(settings=wandb.Settings(silent=True, mode="offline"))
        return _init("offline", run, run_id, is_resumed), f"W&B records offline: {reason(error)}"


def _mode() -> str:
    """`online` needs an API key (environment, netrc or settings); lowvram never prompts for one."""
    import wandb

    if wandb_environment.is_disabled():
        return "disabled"
    chosen = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
    if chosen in ("disabled", "offline", "dryrun"):
        return "disabled" if chosen == "disabled" else "offline"
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _init(mode: Any, run: LoggedRun, run_id: str, is_resumed: bool) -> wandb.Run:
    import wandb

    settings = run.settings
    return wandb.init(
        mode=mode,
        reinit="finish_previous",
        settings=wandb.Settings(**_wandb_settings(run)),
        dir=str(run.folder),
        entity=settings.entity,
        project=settings.project or wandb_environment.project(),
        name=text_without_secrets(run.name),
        group=run.group and text_without_secrets(run.group),
        job_type=run.kind,
        tags=[text_without_secrets(tag) for tag in settings.tags or wandb_environment.tags()] or None,
        notes=settings.notes and text_without_secrets(settings.notes),
        id=run_id,
        resume="allow" if is_resumed else None,
        config=without_secrets(run.config),
    )


def _wandb_settings(run: LoggedRun) -> dict[str, Any]:
    """Settings of W&B's client."""
    sampled = {"x_disable_stats": True}  # nothing computes
    if run.pid is not None:
        # The user may set WANDB_X_DISABLE_STATS=true, and another interval.
        interval = (
            {}
            if "WANDB_X_STATS_SAMPLING_INTERVAL" in os.environ
            else {"x_stats_sampling_interval": _SAMPLING_INTERVAL_S}
        )
        sampled = {"x_stats_pid": run.pid, "x_stats_track_process_tree": True, **interval}
    return {
        "console": "off",  # the progress bar has the terminal
        "save_code": False,
        "disable_git": True,
        "x_disable_meta": True,  # holds the command line, which may hold secrets
        "x_transaction_log_flush_interval": _FLUSH_INTERVAL_S,
        "init_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": _MODEL_TIMEOUT_S if run.settings.artifact == MODEL else _UPLOAD_TIMEOUT_S,
        "silent": True,
        **sampled,
    }


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
