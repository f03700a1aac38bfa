"""Records the events of a point's children: in files, at its loggers and in a row. Imports no torch.

The child writes `metrics.jsonl`. Only the parent writes `result.json`, and to loggers: so each child gets its row and
its run at the loggers, however it dies.
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
from lowvram.launch.outcome import Circumstances, RankReport, outcome_of
from lowvram.launch.point import Point, with_parts
from lowvram.launch.stop import StopConditions
from lowvram.results import memory_over_step, metric_lines
from lowvram.results import row as rows
from lowvram.results.advice import data_wait_advice
from lowvram.results.checks import failed_checks
from lowvram.results.files.durable import remove_leftovers, write_bytes
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

OF_A_RANK = ("peak_bytes", "reserved_bytes", "process_peak_bytes", "host_peak_bytes")  # listed for each rank


class Recording:
    """Turns the child's events into logged figures and a row.

    Args:
        disturbs: for the row, why figures measured in the point's process aren't comparable; None if they are.
        can_begin_again: whether the server can start new processes for another attempt.
    """

    def __init__(self, point: Point, progress: Progress, disturbs: str | None, can_begin_again: bool) -> None:
        self.point, self.progress = point, progress
        self._disturbs, self._can_begin_again = disturbs, can_begin_again
        self.row = point.first_row()
        self.reports: dict[int, RankReport] = {}  # by rank
        self.loggers = Loggers()
        self.callbacks = Callbacks(point.config["callbacks"] or (), progress.say)
        self._earlier = EarlierLife.of(point)
        self._step_memory: dict[str, list[float]] = {}  # GiB over the moments of a step, of the last measurement
        self._is_logged = False  # whether the loggers have begun
        self._has_steps = False  # whether a step was recorded
        self._disturbed_row: Row | None = None  # of the measurement before this one
        self._more_parts: int | None = None  # for the next attempt, if this one runs out of memory

    def on_event(self, event: Event) -> None:
        """Handle one event of a child."""
        handlers: dict[str, Callable[..., None]] = {
            "ready": self.add,
            "begin": self._on_begin,
            "memory_over_step": self._on_memory_over_step,
            "metrics": self._on_metrics,
            "progress": self.progress.update,
            "say": self.progress.say,
            "row": self._on_row,
            "snapshot": self.callbacks.snapshot,
        }
        name = event.pop("event")
        if name in handlers:
            handlers[name](**event)
        else:
            self.progress.say(f"warning: the point's process sent an unknown event, {name!r}; it is ignored")

    def add(self, fields: dict[str, Any]) -> None:
        """Merge fields into the row."""
        self.row = rows.merge(self.row, without_secrets(fields))

    def end(self, status: Status, reason: str | None) -> None:
        """Set how the point ended."""
        self.add({"status": status.value, "reason": reason})

    def _on_row(self, rank: int, fields: dict[str, Any], **about: Any) -> None:
        self.reports[rank] = RankReport(fields, **about)

    def conclude(self, ended: list[Ending] | None, around: Circumstances) -> None:
        """When all ranks have ended: merge the first rank's fields, the largest memory peak of all, and the outcome."""
        ended = ended and [{**ending, "rank": ending["rank"] + self.point.first_rank} for ending in ended]
        all_ranks = sorted({*(ending["rank"] for ending in ended or ()), *self.reports})
        ranks = {rank: self.reports[rank].fields if rank in self.reports else {} for rank in all_ranks}
        first = ranks.get(self.point.first_rank, {})
        self.add(first | {"disturbed": together(self.row["disturbed"], first.get("disturbed"))})
        if len(ranks) > 1:
            self._add_ranks(ranks)
        for log in (native_log(rank) for rank in all_ranks):
            clean(self.point.folder / log)
        if self.point.launch is None:  # else ranks of other programs may still save together
            with suppress(OSError):
                remove_leftovers(self.point.folder)
        end = outcome_of(ended, self.reports, around, self.point.config["sharding"]["timeout_s"])
        blamed = self.reports.get(end.rank)
        if end.status == Status.ERROR and blamed is not None:
            for line in blamed.trace.splitlines():
                self.progress.say(line)
        self.end(end.status, end.reason)

    def _add_ranks(self, ranks: dict[int, dict[str, Any]]) -> None:
        """Add the memory of each rank; the point's memory is that of the rank with the largest peak."""
        memory = {rank: fields.get("memory", {}) for rank, fields in ranks.items()}
        per_rank = [{"rank": rank, **{key: held.get(key) for key in OF_A_RANK}} for rank, held in memory.items()]
        self.add({"memory": max(memory.values(), key=lambda held: held.get("peak_bytes") or 0), "ranks": per_rank})

    def begins_again(self, stop_conditions: StopConditions) -> bool:
        """After an attempt: whether another one follows, with more parts; if so, prepare it."""
        parts = self._more_parts
        if self.row["status"] != Status.OOM or parts is None or not self._can_begin_again:
            return False
        fewer, self.point = self.row["config"]["accum"]["parts"], in_parts(self.point, parts, self.row)
        self.row, self.reports, self._more_parts = self.point.first_row(), {}, None
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
            self.row = put_back(self.point.folder, self._disturbed_row, self.row)
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
        self.row, self.reports, self._more_parts = self.point.first_row(), {}, None
        return True

    def _on_begin(
        self,
        step: int,
        num_steps: int,
        setup_s: float,
        parts: int,
        more_parts: int | None,
        pid: int,
        untold: list[Values],
    ) -> None:
        self.add({"time": {"setup_s": setup_s}, "config": with_parts(self.point.config, parts)})
        self._more_parts = more_parts
        if self.point.is_resumed:  # written only now: from here on the run can't be refused any more
            write_notes(self.point.folder, self.point.notes)
        self._begin_logging(step, pid)
        for row in untold:
            self.loggers.log(row["step"], {name: value for name, value in row.items() if name != "step"})
        self.callbacks.begin(without_secrets(self.point.config), step)
        self.progress.start(self.point.name, num_steps)
        self.progress.update(step, {})

    def _on_metrics(self, step: int, values: dict[str, float], is_late: bool) -> None:
        self._has_steps = True
        self.loggers.log(step, values)
        self.callbacks.log(step, values)
        if not is_late:
            self.progress.update(step, values)

    def _on_memory_over_step(self, kinds: list[str], moments: list[list[Any]]) -> None:
        """Record the memory of each kind over the births and deaths of tensors in one step."""
        memory_over_step.write(self.point.folder, kinds, moments)
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
        if self.row["status"] == Status.INCOMPATIBLE and self._has_steps:
            self.add({"status": Status.ERROR})  # what has run stays, and can go on
        has_begun = self._earlier is not None and self._is_logged  # so that its files have changed
        if self.row["status"] == Status.INCOMPATIBLE and self.point.sweep is None and not has_begun:
            return self.row  # nothing ran, so nothing is kept
        self.add({"disturbed": together(self._disturbs, self.row["disturbed"], *failed_checks(self.row))})
        self._advise()
        if self._earlier is not None and self._earlier.stays(self.row):
            return self._keep(self._earlier)
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
        choices, plan = self.row["choices"], self.row["plan"] or {}
        if self.row["status"] == Status.OOM:
            advice = plan.get("advice", "try a smaller model or a larger vram")  # missing if the planning was killed
            self.add({"reason": f"{self.row['reason']}; {advice}"})
            if self._more_parts is not None:
                which = "torchrun's processes" if self.point.launch else "a process that ran out of memory"
                why = f"{which} can't begin again with more parts: type accum.parts={self._more_parts}"
                self.add({"reason": f"{self.row['reason']}; {why}"})
        if advice := data_wait_advice(self.row["time"]["data_wait_frac"], choices):
            self.progress.say(advice)

    def abandon(self, status: str, reason: str) -> None:
        """Write the row of a point whose program ends at once, called by another thread."""
        row = rows.merge(self.row, {"status": status, "reason": reason})
        if self._earlier is None or not self._earlier.stays(row):
            rows.write(self.point.folder, row)

    def unwritable(self, error: OSError) -> Row:
        """The row of a point whose results can't be written: the row says so, and the sweep goes on."""
        self.progress.stop()
        self.end(Status.ERROR, f"{error.strerror} while writing {error.filename or self.point.folder}")
        with suppress(OSError):
            if self._earlier is not None and self._earlier.stays(self.row):
                return self._keep(self._earlier)
        self.loggers.finish(self.row)
        self.callbacks.end(self.row)
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


def together(*reasons: str | None) -> str | None:
    """All reasons, joined; None if there are none."""
    return "; ".join(filter(None, reasons)) or None
