"""Follows a run: tells its events to loggers and callbacks, and writes the row of a worker that died without one.
Imports no torch.

The first rank writes `metrics.jsonl` and `result.json`. Each run gets its row and its end at the loggers, however it
dies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowvram.config.parent_settings import logger_settings
from lowvram.config.secret import text_without_secrets, without_secrets
from lowvram.launch.client import Ending, Event
from lowvram.launch.native_log import native_log
from lowvram.launch.outcome import Circumstances, outcome_of
from lowvram.launch.spec import Point
from lowvram.launch.stop import StopConditions
from lowvram.results import metric_lines
from lowvram.results import row as rows
from lowvram.results.advice import data_wait_advice
from lowvram.results.files.durable import remove_files, remove_leftovers, write_bytes
from lowvram.results.loggers import logger
from lowvram.results.loggers.all import Loggers
from lowvram.results.loggers.logger import LoggedRun, config_of
from lowvram.results.metric_lines import Values
from lowvram.results.row import GIB, Row, Status
from lowvram.results.terminal import Progress, shown_path
from lowvram.runs.callbacks import Callbacks
from lowvram.runs.earlier import EarlierLife
from lowvram.runs.hydra_notes import write_notes
from lowvram.runs.retry import in_parts, is_due, put_back, set_aside
from lowvram.runs.row_so_far import RowSoFar


class Recording:
    """Follows a run from its events to its row.

    Args:
        disturbs: for the row, why figures measured in the point's process aren't comparable; None if they are.
        can_begin_again: whether the server can start new processes for another attempt.
    """

    def __init__(self, point: Point, progress: Progress, disturbs: str | None, can_begin_again: bool) -> None:
        self.point, self.progress = point, progress
        self._disturbs, self._can_begin_again = disturbs, can_begin_again
        self._so_far = RowSoFar(point)
        self.loggers = Loggers()
        self.callbacks = Callbacks(point.config["callbacks"] or (), progress.say)
        self._earlier = EarlierLife.of(point)
        self._row_before = rows.read(point.folder)
        self._step_memory: dict[str, list[float]] = {}  # GiB over the moments of a step, of the last measurement
        self._is_logged = False  # whether the loggers have begun
        self._disturbed_row: Row | None = None  # of the measurement before this one

    @property
    def row(self) -> Row:
        return self._so_far.row

    def on_event(self, event: Event) -> None:
        """Handle one event of a child."""
        handlers: dict[str, Callable[..., None]] = {
            "begin": self._on_begin,
            "memory_over_step": self._on_memory_over_step,
            "metrics": self._on_metrics,
            "progress": self.progress.update,
            "say": self.progress.say,
            "snapshot": self.callbacks.snapshot,
        }
        name = event.pop("event")
        self._so_far.on_event(name, event)
        if name in handlers:
            handlers[name](**event)

    def add(self, fields: dict[str, Any]) -> None:
        """Merge fields into the row."""
        self._so_far.add(fields)

    def end(self, status: Status, reason: str | None) -> None:
        """Set how the point ended."""
        self.add({"status": status.value, "reason": reason})

    def conclude(self, ended: list[Ending] | None, around: Circumstances) -> None:
        """When all ranks have ended: merge what they have reported, and the outcome."""
        ended = ended and [{**ending, "rank": ending["rank"] + self.point.first_rank} for ending in ended]
        reports = self._so_far.reports
        all_ranks = {*(ending["rank"] for ending in ended or ()), *reports}
        self._so_far.add_reports(self.point.first_rank, all_ranks)
        for log in (native_log(rank) for rank in all_ranks):
            clean(self.point.folder / log)
        if self.point.launch is None:  # else ranks of other programs may still save together
            with suppress(OSError):
                remove_leftovers(self.point.folder)
        end = outcome_of(ended, reports, around, self.point.config["sharding"]["timeout_s"])
        blamed = reports.get(end.rank)
        if end.status == Status.ERROR and blamed is not None:
            for line in blamed.trace.splitlines():
                self.progress.say(line)
        self.end(end.status, end.reason)

    def begins_again(self, stop_conditions: StopConditions) -> bool:
        """After an attempt: whether another one follows, with more parts; if so, prepare it."""
        parts = self._so_far.more_parts
        if self.row["status"] != Status.OOM or parts is None or not self._can_begin_again:
            return False
        fewer, self.point = self.row["config"]["accum"]["parts"], in_parts(self.point, parts, self.row)
        self._so_far = RowSoFar(self.point)
        if stop_conditions.is_stopped:
            self.end(Status.INTERRUPTED, f"stopped after running out of memory with accum.parts={fewer}")
            return False
        self.progress.say(f"out of memory with accum.parts={fewer}: again with {parts}")
        return True

    def plan_anew(self, plan_again: Callable[[Point], Point]) -> None:
        """Before another attempt: plan it."""
        self.point = plan_again(self.point)
        self.add({"plan": self.point.plan, "config": self.point.config})

    def measures_again(self, stop_conditions: StopConditions) -> bool:
        """After a measurement: whether it was disturbed and is repeated; if so, prepare that. If a repetition failed,
        restore the row of the measurement before it."""
        if self._disturbed_row is not None and self.row["status"] != Status.OK:
            self._so_far.row = put_back(self.point.folder, self._disturbed_row, self.row)
            return False
        if (
            stop_conditions.is_stopped
            or stop_conditions.is_timed_out
            or not (self._can_begin_again and is_due(self.row))
        ):
            return False
        self.progress.say(f"{self.point.name}: disturbed, so measured again: {self.row['disturbed']}")
        self._disturbed_row, reruns = self.row, set_aside(self.point.folder, self.row)
        self.point = replace(self.point, reruns=reruns)
        self._so_far = RowSoFar(self.point)
        return True

    def _on_begin(
        self,
        step: int,
        num_steps: int,
        pid: int,
        untold: list[Values],
        **_: Any,
    ) -> None:
        if self.point.is_resumed:  # written only now: from here on the run can't be refused any more
            write_notes(self.point.folder, self.point.notes)
        if self._earlier is not None and not self._is_logged and (missing := self._earlier.what_is_missing()):
            self.progress.say(missing)
        self._begin_logging(step, pid)
        self.callbacks.begin(without_secrets(self.point.config), step)
        for row in untold:
            self._tell(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
        self.progress.start(self.point.name, num_steps)
        self.progress.update(step, {})

    def _on_metrics(self, step: int, values: dict[str, float], is_late: bool) -> None:
        self._tell(step, values)
        if not is_late:
            self.progress.update(step, values)

    def _tell(self, step: int, values: Values) -> None:
        self.loggers.log(step, values)
        self.callbacks.log(step, values)

    def _on_memory_over_step(self, kinds: list[str], moments: list[list[Any]]) -> None:
        """Keep the memory of each kind over the births and deaths of tensors in one step, for the loggers."""
        columns = zip(kinds, list(zip(*moments, strict=True))[2:], strict=False)  # after the event and the phase
        self._step_memory = {f"{kind}_gib": [size / GIB for size in sizes] for kind, sizes in columns if any(sizes)}

    def _begin_logging(self, step: int = 0, pid: int | None = None) -> None:
        """Tell the loggers that the point runs, in the process `pid`, after `step`."""
        self._is_logged = True
        point, logged = self.point, self.row["logged"]
        name, kind = logged["name"] or point.name, self.row["choices"]["mode"]
        settings, config = logger_settings(point.config["logger"]), config_of(point.config, self.row)
        self.loggers.begin(LoggedRun(point.folder, name, logged["group"], kind, settings, config, step, pid))

    def close(self) -> Row:
        """When the row is complete: add advice, write it, end the loggers."""
        self.progress.stop()
        metric_lines.sync(self.point.folder)
        self._so_far.complete(self._disturbs)
        has_row = self._earlier is not None and self._earlier.row is not None
        has_begun = has_row and self._is_logged  # so that its files have changed
        if self.row["status"] == Status.INCOMPATIBLE and self.point.sweep is None and not has_begun:
            if self._earlier is not None:
                self._earlier.put_back()
            if not has_row:  # it may be that of a rank that was asked to stop as another one was refused
                remove_files([self.point.folder / rows.FILE_NAME])
            return self.row  # nothing ran, so nothing is kept
        self._advise()
        if self._earlier is not None and self._earlier.stays(self.row):
            return self._keep(self._earlier)
        if rows.read(self.point.folder) != self.row:  # its process didn't write it, or not as it is after all
            rows.write(self.point.folder, self.row)  # first: an upload may take long
        if not self._is_logged:  # it ended before its first step
            self._begin_logging()
        if self._step_memory:
            self.loggers.log_curves(logger.STEP_MEMORY, self._step_memory)
        self.loggers.finish(self.row)
        self._tell_end()
        return self.row

    def _keep(self, earlier: EarlierLife) -> Row:
        """Leave the folder as it was before this run; returns the row of this run, which is only printed."""
        assert earlier.row is not None
        earlier.put_back()
        self.loggers.finish(earlier.row)
        path, status = shown_path(self.point.folder / rows.FILE_NAME), earlier.row["status"]
        self.progress.say(f"{path} stays as it was ({status}): this run ended before it saved a step")
        self._tell_end()
        return self.row

    def _tell_end(self) -> None:
        """Print what the loggers have to say, and tell the callbacks the row of this run."""
        uploads = self.loggers.uploads if self.point.sweep is None else []  # a sweep tells it once, for all
        for line in (*self.loggers.notes, *(f"to upload: {upload}" for upload in uploads)):
            self.progress.say(line)
        self.callbacks.end(self.row)

    def _advise(self) -> None:
        if advice := data_wait_advice(self.row["time"]["data_wait_frac"], self.row["choices"]):
            self.progress.say(advice)

    def abandon(self, status: str, reason: str) -> None:
        """Write the row of a point whose program ends at once, called by another thread."""
        row = rows.merge(self.row, {"status": status, "reason": reason})
        if not (self._has_result() or (self._earlier is not None and self._earlier.stays(row))):
            rows.write(self.point.folder, row)

    def _has_result(self) -> bool:
        """Whether this run's own process has written a row that stays."""
        row = rows.read(self.point.folder)
        return row is not None and rows.is_final(row) and row != self._row_before

    def unwritable(self, error: OSError) -> Row:
        """The row of a point whose results can't be written: the row says so, and the sweep goes on."""
        self.progress.stop()
        self.end(Status.ERROR, f"{error.strerror} while writing {error.filename or self.point.folder}")
        with suppress(OSError):
            if self._earlier is not None and self._earlier.stays(self.row):
                return self._keep(self._earlier)
        if self._has_result():
            self.progress.say(f"{self.point.name}: {self.row['reason']}")
            self._so_far.row = rows.read(self.point.folder) or self.row
        self.loggers.finish(self.row)
        self.callbacks.end(self.row)
        if not self._has_result():
            with suppress(OSError):
                rows.write(self.point.folder, self.row)
        return self.row


def clean(log: Path) -> None:
    """Remove secrets from the output of native code, which reaches the file without passing through us."""
    if log.is_symlink() or not log.is_file():
        return
    with suppress(OSError):  # an unwritable log doesn't fail the point
        text = log.read_bytes().decode(errors="surrogateescape")
        if (without := text_without_secrets(text)) != text:
            write_bytes(log, without.encode(errors="surrogateescape"))
