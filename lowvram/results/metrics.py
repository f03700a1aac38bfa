"""The one list of a row's figures. Rows, tables, CSV, summaries, loggers, reports and docs are made from it.

A new figure is one entry here and the code that measures it, such as the `figures()` of a stepper. The fields of a row
that are no figures are listed in row_fields.py. Needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, IntEnum, auto
from typing import final

from lowvram.core.kind import Kind

GIB = 2**30
BYTES = "bytes"  # tables show these figures in MiB or GiB


class Better(IntEnum):
    """Which of two values is the better one."""

    SMALLER = -1
    NEITHER = 0
    LARGER = 1


class Shown(Flag):
    """Where a figure is shown, beside the row and table.csv, which have all of them."""

    TABLE = auto()  # in the terminal, in Markdown and in reports
    TABLE_OF_PLANS = auto()  # only in tables in which nothing was measured
    TABLE_WITH_BUDGET = auto()  # only in tables of plans, or with points that have a `vram` limit
    TABLE_WITH_PADDING = auto()  # only in tables in which batches have padding
    TABLE_OF_FILES = auto()  # only in tables whose exported files differ in size
    SUMMARY = auto()  # in the lines printed after a single run


class Format(ABC):
    """How values are written."""

    @abstractmethod
    def column(self, values: Sequence[float | None]) -> tuple[str, ...]:
        """The values of a column; "" for None."""

    @abstractmethod
    def alone(self, value: float) -> str:
        """A single value in a line of text."""


@final
@dataclass(frozen=True)
class Digits(Format):
    """At least `num_digits` digits; all values of a column have equally many decimals."""

    num_digits: int = 3

    def column(self, values: Sequence[float | None]) -> tuple[str, ...]:
        return number_texts(values, self.num_digits)

    def alone(self, value: float) -> str:
        return f"{value:.4g}"


@final
@dataclass(frozen=True)
class Count(Format):
    """For whole numbers, such as 124,439,808."""

    def column(self, values: Sequence[float | None]) -> tuple[str, ...]:
        return tuple("" if value is None else f"{value:,.0f}" for value in values)

    def alone(self, value: float) -> str:
        return f"{value:,.0f}"


@final
@dataclass(frozen=True)
class PowersOfTen(Format):
    """For figures that span powers of ten, such as 1.2e-03."""

    def column(self, values: Sequence[float | None]) -> tuple[str, ...]:
        return tuple("" if value is None else f"{value:.1e}" if value else "0" for value in values)

    def alone(self, value: float) -> str:
        return f"{value:.1e}"


def number_texts(values: Sequence[float | None], num_digits: int) -> tuple[str, ...]:
    """The values with equally many decimals: as many as the smallest needs for `num_digits` digits."""
    sizes = [abs(value) for value in values if value]
    exponent = math.floor(math.log10(min(sizes))) if sizes else 0
    num_decimals = min(max(num_digits - 1 - exponent, 0), num_digits + 1)
    return tuple("" if value is None else f"{value:.{num_decimals}f}" for value in values)


@dataclass(frozen=True)
class Metric:
    """One figure.

    Args:
        path: dotted path of its value in a row.
        title: of its column; `{unit}` is replaced by the table's unit of memory. `csv_name` follows from it and mustn't
            change: users join the files of many sweeps.
        unit: "" if the value is a pure number.
        logger_name: its name at the loggers, where sizes are in GiB; None: they aren't told it.
        of_training: whether it is comparable only after equally many steps.
    """

    path: str
    title: str
    unit: str = ""
    format: Format = Digits()
    better: Better = Better.NEITHER
    logger_name: str | None = None
    shown_in: Shown = Shown.TABLE
    of_training: bool = False

    @property
    def is_size(self) -> bool:
        return self.unit == BYTES

    @property
    def csv_name(self) -> str:
        """The name of its column in table.csv and rows.jsonl, such as `peak_bytes`: with its unit, in which it is there
        whatever the tables show."""
        return self.title.replace("{unit}", "bytes").replace("/", "_per_").replace(" ", "_")

    @property
    def section(self) -> str:
        """The section of the row that holds it."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name in its section, in words and without the unit."""
        return self.path.rpartition(".")[2].removesuffix("_bytes").replace("_", " ")

    def logger_value(self, value: float) -> float:
        """Its value as the loggers get it."""
        return value / GIB if self.is_size else value


PEAK = "memory.peak_bytes"
LEAST_VRAM = "plan.least_vram_bytes"
SLOW_STEP = "time.step_ms_p95"
FILE_SIZE = "export.file_bytes"
PADDING = "data.padding"
SMALLER, LARGER = Better.SMALLER, Better.LARGER
NOWHERE = Shown(0)  # only in the row, in table.csv and at the loggers


def score(name: str) -> Metric:
    """A score of an evaluation that isn't one of `METRICS`: of `eval.metrics`, or of a task of the user's own."""
    return Metric(f"eval.{name}", name, logger_name=f"eval/{name}", of_training=True)


# In the order of the columns. results/terminal.py writes some of them into sentences of the summary.
METRICS: tuple[Metric, ...] = (
    Metric(PEAK, "peak {unit}", BYTES, better=SMALLER, logger_name="memory/peak_gib"),
    Metric("memory.reserved_bytes", "reserved {unit}", BYTES, logger_name="memory/reserved_gib", shown_in=NOWHERE),
    Metric("memory.rehearsed_peak_bytes", "rehearsed {unit}", BYTES, shown_in=NOWHERE),
    Metric("plan.allocated_bytes", "planned {unit}", BYTES, better=SMALLER, logger_name="memory/planned_gib"),
    Metric("plan.reserved_bytes", "planned reserved {unit}", BYTES, better=SMALLER, shown_in=Shown.TABLE_OF_PLANS),
    Metric("plan.host_bytes", "planned host {unit}", BYTES, better=SMALLER, shown_in=Shown.TABLE_OF_PLANS),
    Metric(LEAST_VRAM, "least vram {unit}", BYTES, better=SMALLER, shown_in=Shown.TABLE_WITH_BUDGET),
    Metric("plan.step_ms", "planned step ms", "ms", better=SMALLER, shown_in=Shown.TABLE_OF_PLANS),
    Metric("plan.cost", "planned cost", format=Digits(4), better=SMALLER),
    Metric("plan.wire_bytes", "sent to ranks {unit}/step", BYTES, better=SMALLER, shown_in=Shown.TABLE_OF_PLANS),
    *(
        Metric(
            f"memory.by_kind_max.{kind.value}",
            f"{kind.value} {{unit}}",
            BYTES,
            better=SMALLER,
            logger_name=f"memory/{kind.value}_gib",
            shown_in=Shown.TABLE if kind is Kind.ACTIVATIONS else NOWHERE,
        )
        for kind in Kind
    ),
    Metric(
        "memory.fragmentation_bytes",
        "fragmentation {unit}",
        BYTES,
        better=SMALLER,
        logger_name="memory/fragmentation_gib",
    ),
    Metric(
        "memory.beyond_tensors_bytes",
        "beyond tensors {unit}",
        BYTES,
        logger_name="memory/beyond_tensors_gib",
        shown_in=NOWHERE,
    ),
    Metric(
        "memory.inactive_split_bytes",
        "inactive split {unit}",
        BYTES,
        logger_name="memory/inactive_split_gib",
        shown_in=NOWHERE,
    ),
    Metric("memory.alloc_retries", "allocation retries", logger_name="memory/alloc_retries", shown_in=NOWHERE),
    Metric("traffic.to_host_bytes", "to host {unit}/step", BYTES, better=SMALLER, logger_name="traffic/to_host_gib"),
    Metric(
        "traffic.to_device_bytes", "to device {unit}/step", BYTES, better=SMALLER, logger_name="traffic/to_device_gib"
    ),
    Metric("throughput.samples_per_s", "samples/s", "samples/s", better=LARGER, logger_name="throughput/samples_per_s"),
    Metric("throughput.tokens_per_s", "tokens/s", "tokens/s", better=LARGER, logger_name="throughput/tokens_per_s"),
    Metric("throughput.mfu", "mfu", logger_name="throughput/mfu", shown_in=NOWHERE),
    Metric(PADDING, "padding", better=SMALLER, shown_in=Shown.TABLE_WITH_PADDING),
    Metric("data.cache_bytes", "cache {unit}", BYTES, logger_name="data/cache_gib", shown_in=Shown.SUMMARY),
    Metric("data.cache_hit_frac", "cache hit frac", logger_name="data/cache_hit_frac", shown_in=Shown.SUMMARY),
    Metric("time.step_ms_p50", "step ms p50", "ms", better=SMALLER, logger_name="time/step_ms"),
    Metric("time.step_ms_p05", "step ms p05", "ms", shown_in=NOWHERE),
    Metric(SLOW_STEP, "step ms p95", "ms", shown_in=NOWHERE),
    Metric(
        "cost.total",
        "cost",
        format=Digits(4),
        better=SMALLER,
        logger_name="cost/total",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    Metric("traffic.waited_ms", "copies waited ms", "ms", better=SMALLER, logger_name="traffic/waited_ms"),
    Metric("loss.first", "first loss", shown_in=Shown.SUMMARY),
    Metric(
        "loss.last",
        "last loss",
        format=Digits(4),
        better=SMALLER,
        logger_name="loss/train",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    Metric(
        "loss.eval",
        "eval loss",
        format=Digits(4),
        better=SMALLER,
        logger_name="loss/eval",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    Metric(
        "eval.accuracy",
        "accuracy",
        better=LARGER,
        logger_name="eval/accuracy",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    # Of exits after earlier blocks, with depth=early_exit.
    *(
        Metric(
            f"eval.{name}",
            title,
            format=Digits(4),
            better=better,
            logger_name=f"eval/{name}",
            shown_in=Shown.TABLE | Shown.SUMMARY,
            of_training=True,
        )
        for name, title, better in (
            ("loss_early", "eval loss early", SMALLER),
            ("accuracy_early", "accuracy early", LARGER),
            ("blocks_used", "blocks used", SMALLER),
        )
    ),
    Metric(
        "eval.perplexity",
        "perplexity",
        better=SMALLER,
        logger_name="eval/perplexity",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    *(
        metric
        for what in ("pruning", "growing")
        for when, shown in (("before", Shown.SUMMARY), ("after", Shown.TABLE | Shown.SUMMARY))
        for metric in (
            Metric(
                f"{what}.parameters_{when}",
                f"parameters {when} {what}",
                format=Count(),
                logger_name=f"{what}/parameters_{when}",
                shown_in=shown,
            ),
            Metric(
                f"{what}.file_{when}_bytes",
                f"file {when} {what} {{unit}}",
                BYTES,
                logger_name=f"{what}/file_{when}_gib",
                shown_in=Shown.SUMMARY,  # in tables it is `export.file_bytes`
            ),
            Metric(
                f"{what}.loss_{when}",
                f"eval loss {when} {what}",
                format=Digits(4),
                logger_name=f"{what}/loss_{when}",
                shown_in=Shown.SUMMARY,  # afterwards it is `loss.eval` too
            ),
        )
    ),
    # Of the run as a whole: how long it trained, and which of its weights were exported.
    Metric("training.steps", "trained steps", format=Count(), shown_in=NOWHERE),
    Metric("training.skipped_steps", "skipped steps", format=Count(), shown_in=Shown.SUMMARY),
    Metric("training.exported_step", "exported step", format=Count(), shown_in=NOWHERE),
    Metric("training.best_step", "best step", format=Count(), shown_in=Shown.SUMMARY),
    Metric("training.best_value", "best value", format=Digits(4), shown_in=Shown.SUMMARY),
    # Of the exported file, as it was loaded again; docs/export.md.
    Metric(
        "eval.loss_exported",
        "exported eval loss",
        format=Digits(4),
        better=SMALLER,
        logger_name="eval/loss_exported",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    Metric(
        FILE_SIZE,
        "exported file {unit}",
        BYTES,
        better=SMALLER,
        logger_name="export/file_gib",
        shown_in=Shown.TABLE_OF_FILES,
    ),
    Metric("export.latency_ms", "export latency ms", "ms", better=SMALLER, logger_name="export/latency_ms"),
    Metric(
        "export.latency_fp32_ms",
        "fp32 latency ms",
        "ms",
        logger_name="export/latency_fp32_ms",
        shown_in=NOWHERE,
    ),
    Metric(
        "model.share_of_zeros",
        "share of zeros",
        format=Digits(4),
        logger_name="model/share_of_zeros",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    Metric(
        "gradient.noise_scale",
        "noise scale",
        "samples",
        logger_name="noise_scale",
        shown_in=Shown.TABLE | Shown.SUMMARY,
        of_training=True,
    ),
    # No best value is marked: below some size they are all noise.
    Metric("fidelity.gradient_error", "gradient error", format=PowersOfTen(), logger_name="fidelity/gradient_error"),
    Metric(
        "fidelity.gradient_cosine",
        "gradient cosine",
        format=Digits(6),
        logger_name="fidelity/gradient_cosine",
        shown_in=NOWHERE,
    ),
    Metric("fidelity.loss_gap", "loss gap", logger_name="fidelity/loss_gap"),
)

# In a narrow terminal, or window of the report, the table's columns get room in this order: figures by their paths,
# columns of words by their titles. Those that aren't listed come last, in the order of the table.
BY_IMPORTANCE = (
    PEAK,
    "status",
    "memory source",
    "fits",
    "disturbed",
    "throughput.tokens_per_s",
    LEAST_VRAM,
    "loss.eval",
    "plan.allocated_bytes",
    "plan.step_ms",
    "throughput.samples_per_s",
    "time.step_ms_p50",
    "command",
    "fidelity.gradient_error",
    "loss.last",
    "memory.by_kind_max.activations",
    "eval.accuracy",
    "eval.perplexity",
    "p05-p95",
)


def importance(key: str) -> int:
    """The place of a column in `BY_IMPORTANCE`; 0 is the most important one."""
    return BY_IMPORTANCE.index(key) if key in BY_IMPORTANCE else len(BY_IMPORTANCE)
