"""Prints the progress of a point, and its summary at the end. Needs no torch; imports rich on first use."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lowvram.config.secret import words_without_secrets
from lowvram.results.metrics import GIB, METRICS, Metric, Shown
from lowvram.results.planned import plan_lines
from lowvram.results.row import Row, Status, attempts_text, beyond_tensors_text, is_final, reruns_text, size_text
from lowvram.results.row_fields import at
from lowvram.results.shown import last_shown, shown

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

SOURCES_IN_WORDS = {
    "cuda_allocator": "peak of the CUDA allocator",
    "tensor_ledger": "peak of live tensor bytes on CPU",
    "process": "peak growth of the process",
}
_SECONDS_BETWEEN_LINES = 5.0
_SHOW_CURSOR_AND_RESET_COLORS = "\x1b[?25h\x1b[0m"


class Progress(ABC):
    """Shows how far a point is, one point at a time: start, update, stop; then the next."""

    @abstractmethod
    def start(self, name: str, total_steps: int | None, unit: str = "step") -> None:
        """A point begins; `total_steps` is None if a time limit ends it. `unit`: the name of what is counted."""

    @abstractmethod
    def update(self, step: int, values: Mapping[str, float]) -> None:
        """`step` steps are done; `values` are the metrics since then, named as in `metrics.jsonl`."""

    def say(self, text: str) -> None:
        """Prints a line above the progress."""
        self.show(last_shown(text))

    @abstractmethod
    def show(self, text: str) -> None:
        """Prints escaped lines above the progress."""

    @abstractmethod
    def stop(self) -> None:
        """The point has ended, in whatever way."""


class LiveProgress(Progress):
    """A progress bar, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: RichProgress | None = None
        self._values: dict[str, float] = {}

    def start(self, name: str, total_steps: int | None, unit: str = "step") -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self.stop()
        self._values = {}
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),  # gives way in a narrow terminal
            progress.BarColumn(bar_width=10),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TextColumn("{task.fields[values]}", markup=False, table_column=Column(no_wrap=True)),
            progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
            console=Console(file=self._stream),
            transient=True,
        )
        self._bar.add_task(shown(name), total=total_steps, values="")
        self._bar.start()
        # An uncaught exception must not leave the shell without a cursor.
        atexit.register(self.stop)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._values |= values
            self._bar.update(self._bar.task_ids[0], completed=step, values=values_text(self._values))

    def show(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self.stop)


class QuietProgress(Progress):
    """A line at the start, then one every few seconds, for files and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._values: dict[str, float] = {}
        self._of_total, self._unit = "", "step"
        self._started_s = self._printed_s = clock()

    def start(self, name: str, total_steps: int | None, unit: str = "step") -> None:
        self._values, self._unit = {}, unit
        self._of_total = "" if total_steps is None else f"/{total_steps}"
        self._started_s = self._printed_s = self._clock()
        self.say(f"{name}: started" if total_steps is None else f"{name}: started, {total_steps} {unit}s")

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values
        now_s = self._clock()
        if now_s - self._printed_s < _SECONDS_BETWEEN_LINES:
            return
        self._printed_s = now_s
        parts = (
            f"{self._unit} {step}{self._of_total}",
            values_text(self._values),
            f"{now_s - self._started_s:.0f} s",
        )
        self.say(", ".join(part for part in parts if part))

    def show(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def stop(self) -> None:
        pass


def progress_for(stream: TextIO) -> Progress:
    """A progress bar on a terminal that can redraw lines, else plain lines."""
    can_move = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveProgress(stream) if can_move else QuietProgress(stream)


def tell(line: str, stream: TextIO | None = None) -> None:
    """Prints a line, escaped, as it may hold text from anywhere, to `stream` or standard output."""
    print(shown(line), file=stream)


def restore_terminal(stream: TextIO) -> None:
    """Gives a terminal its cursor and colours back, after a process died while it was drawing."""
    if stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown"):
        stream.write(_SHOW_CURSOR_AND_RESET_COLORS)
        stream.flush()


@contextmanager
def terminal_restored() -> Iterator[None]:
    """Afterwards cursor, colours and echo are as before, however a child may have died."""
    before = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield
    finally:
        restore_terminal(sys.stdout)
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def values_text(values: Mapping[str, float]) -> str:
    """The metrics shown at every step, on one line; tokens/s if known, else samples/s."""
    unit = "tokens" if "throughput/tokens_per_s" in values else "samples"
    texts: dict[str, Callable[[float], str]] = {
        "loss/train": lambda loss: f"loss {loss:.4g}",
        f"throughput/{unit}_per_s": lambda rate: f"{_rate(rate)} {unit}/s",
        "memory/peak_gib": lambda peak_gib: f"peak {size_text(peak_gib * GIB)}",
        "memory/process_gib": lambda peak_gib: f"process {size_text(peak_gib * GIB)}",
    }
    return ", ".join(text(values[name]) for name, text in texts.items() if name in values)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def summary(row: Row, folder: Path | None = None, more_words: Iterable[str] = ()) -> list[str]:
    """The lines that are printed after a single run. Values that the row doesn't have are left out.

    `more_words`: further arguments for the command that resumes the run.
    """
    lines = [
        _parts(": ", row["name"], row["status"], row["reason"]),
        _titled("parts", [attempts_text(row)]),
        _titled("memory", [_memory(row), *_figures(row, "memory")]),
        _titled("moved", [*_traffic(row), *_figures(row, "traffic")]),
        *(plan_lines(row["plan"]) if _shows_plan(row) else []),
        _titled("speed", [*_speeds(row), *_figures(row, "throughput", "time")]),
        *(_titled(section, _figures(row, section)) for section in _other_sections()),
        _titled("fidelity", [*_fidelity(row["fidelity"] or {}), *_figures(row, "fidelity")]),
        _titled("disturbed", [row["disturbed"], reruns_text(row)]),
        _titled("semantics changed", [row["semantics_changed"]]),
        folder and f"results: {shown_path(folder)}",
        folder and _can_continue(row, folder) and f"continue with: {resume_command(folder, *more_words)}",
    ]
    return [shown(line) for line in lines if line]


def _shows_plan(row: Row) -> bool:
    """Whether the plan is the point's result, or the reason why it ended."""
    return row["memory"]["peak_bytes"] is None and row["status"] in (Status.OK, Status.OOM, Status.SKIPPED)


def _parts(between: str, *parts: str | None) -> str:
    return between.join(part for part in parts if part)


def _titled(title: str, parts: list[str | None]) -> str:
    return _parts(": ", title, _parts(", ", *parts)) if any(parts) else ""


_IN_SENTENCES = (
    "memory",
    "traffic",
    "throughput",
    "time",
    "fidelity",
)  # sections that `summary` writes into lines of their own


def _other_sections() -> Iterable[str]:
    """The other sections with figures in the summary: one line each, headed by its name."""
    sections = [metric.section for metric in METRICS if Shown.SUMMARY in metric.shown_in]
    return dict.fromkeys(section for section in sections if section not in _IN_SENTENCES)


def _figures(row: Row, *sections: str) -> list[str | None]:
    """The summary's figures in these sections, and for `eval` also the scores of the task that METRICS doesn't list."""
    metrics = [metric for metric in METRICS if metric.section in sections and Shown.SUMMARY in metric.shown_in]
    figures = [_figure(metric, value) for metric in metrics if (value := at(row, metric.path)) is not None]
    listed = {metric.path for metric in METRICS}
    scores = row["eval"].items() if "eval" in sections else ()
    return [*figures, *(_number(name, value) for name, value in scores if f"eval.{name}" not in listed)]


def _figure(metric: Metric, value: float) -> str:
    return f"{metric.name} {size_text(value) if metric.is_size else metric.format.alone(value)}"


def _number(what: str, value: float | None) -> str | None:
    return None if value is None else f"{what} {value:.4g}"


def _memory(row: Row) -> str:
    num_bytes = row["memory"]["peak_bytes"]
    source = SOURCES_IN_WORDS.get(row["memory"]["source"], "peak")
    if num_bytes is None:
        return ""
    fragmented, retries = row["memory"]["fragmentation_bytes"], row["memory"]["alloc_retries"]
    planned = (row["plan"] or {}).get("allocated_bytes")
    extra = [
        f"planned {size_text(planned)}" if planned else (row["plan"] or {}).get("reason"),
        f"{size_text(fragmented)} of fragmentation" if fragmented else None,
        f"{retries} allocations tried again" if retries else None,
        beyond_tensors_text(row),
    ]
    return _parts(", ", f"{size_text(num_bytes)} {source}", *extra)


def _traffic(row: Row) -> list[str | None]:
    out, back, waited_ms = (row["traffic"][name] for name in ("to_host_bytes", "to_device_bytes", "waited_ms"))
    if out is None or back is None:
        return []
    waited = None if waited_ms is None else f"waited {waited_ms:.3g} ms"
    return [f"{size_text(out)} to the host", f"{size_text(back)} back a step", waited]


def _speeds(row: Row) -> list[str | None]:
    rates = [(row["throughput"][f"{unit}_per_s"], unit) for unit in ("samples", "tokens")]
    middle, fast, slow = (row["time"][f"step_ms_{p}"] for p in ("p50", "p05", "p95"))
    spread = "" if fast is None or slow is None else f" ({fast:.4g}-{slow:.4g})"
    step = None if middle is None else f"step {middle:.4g} ms{spread}"
    return [*(None if rate is None else f"{_rate(rate)} {unit}/s" for rate, unit in rates), step]


def _fidelity(fidelity: Mapping[str, Any]) -> list[str | None]:
    error, cosine, gap = (fidelity.get(name) for name in ("gradient_error", "gradient_cosine", "loss_gap"))
    return [
        None if error is None else f"gradient error {error:.1e}",
        None if cosine is None else f"cosine {cosine:.6f}",
        None if gap is None else f"loss gap {gap:.3g} over {fidelity['steps']} steps",
        fidelity.get("reason"),
    ]


def _can_continue(row: Row, folder: Path) -> bool:
    return not is_final(row) and any(folder.glob("snapshots/*"))


def resume_command(folder: Path, *more_words: str) -> str:
    """The shell command that resumes the run of this folder."""
    return command_line(f"resume={hydra_quoted(shown_path(folder))}", *more_words)


def command_line(*arguments: str) -> str:
    """The shell command that starts this program again with `arguments`.

    It holds no secrets: the user must type them again.
    """
    num_program_words = len(sys.orig_argv) - len(sys.argv[1:])
    return shlex.join([*sys.orig_argv[:num_program_words], *words_without_secrets(arguments)])


def hydra_quoted(value: str) -> str:
    """`value` quoted so that Hydra's command line reads it back unchanged."""
    # Unquoted only with a slash: Hydra may read other words as a number or null.
    if re.fullmatch(r"[\w./@%+-]*/[\w./@%+-]*", value, re.ASCII):
        return value
    return '"' + re.sub(r'(\\*)("|$)', r"\1\1\2", value).replace('"', '\\"') + '"'


def shown_path(path: Path) -> str:
    """The path, relative to the current folder if it lies below it."""
    path, here = path.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
