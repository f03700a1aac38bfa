"""Two reasons to run a point again, in fresh processes. Imports no torch.

accum=auto: it ran out of memory, and starts again with more parts. The logical batch stays the same, and so do the
gradients; a run continues from the last snapshot. The knob (knobs/accum.py) determines the next number of parts, which
the child reports before its first step.

measure.reruns: its measurement was disturbed, and is repeated. Every measurement is kept: its row in
`disturbed-1.json`, its log in `disturbed-1.jsonl`, and the final row lists them. The first undisturbed measurement
counts, else the last one, even if others were faster: the best of several would be a biased figure.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lowvram.launch.spec import Attempts, Config, Measurement, Point, with_parts, without_chosen
from lowvram.results import metric_lines
from lowvram.results import row as rows
from lowvram.results.columns import value_at
from lowvram.results.files.run_folder import has_snapshots
from lowvram.results.row import Row, Status, write

MODE = "measure"  # conf/mode/measure.yaml


def continued(point: Point) -> Point:
    """The point, if it continues an earlier run with the number of parts that this run had reached."""
    config, attempts = as_left(point.config, rows.read(point.folder) if point.is_resumed else None)
    if attempts is None:
        return point
    return replace(point, config=without_chosen(config, point.plan), attempts=attempts, plan=None)


def in_parts(point: Point, parts: int, row: Row) -> Point:
    """The next attempt, after one with `row` that ran out of memory."""
    config = with_parts(without_chosen(point.config, point.plan), parts)
    is_resumed = has_snapshots(point.folder)
    return replace(point, config=config, is_resumed=is_resumed, attempts=attempts_with(row), plan=None)


def attempts_with(row: Row) -> Attempts:
    """The attempts so far, with the one of `row`, which has run out of memory."""
    about = {"parts": row["config"]["accum"]["parts"], "status": row["status"], "reason": row["reason"]}
    return [*(row["attempts"] or ()), about]


def as_left(config: Config, earlier: Row | None) -> tuple[Config, Attempts | None]:
    """The configuration of a continued run, with the number of parts that it had reached, and the attempts before that.

    Unchanged if no attempt fitted or if the batch split was overridden.
    """
    if earlier is None or not earlier["attempts"] or earlier["status"] == Status.OOM:
        return config, None
    first = with_parts(earlier["config"], earlier["attempts"][0]["parts"])
    if batch_split(first) != batch_split(config):
        return config, None
    return with_parts(config, earlier["config"]["accum"]["parts"]), earlier["attempts"]


def batch_split(config: Config) -> Any:
    """The values that determine which samples are in a part."""
    return config["train"]["batch_size"], config["sharding"], config["accum"]


def is_due(row: Row) -> bool:
    """Whether the measurement of `row` is to be made again."""
    is_measured = row["status"] == Status.OK and row["choices"]["mode"] == MODE
    return is_measured and bool(row["disturbed"]) and len(row["reruns"] or ()) < row["config"]["measure"]["reruns"]


def set_aside(folder: Path, row: Row) -> list[Measurement]:
    """Keep a disturbed measurement of the point in `folder`; returns the next row's list of all disturbed ones."""
    number = len(row["reruns"] or ()) + 1
    write(folder, row, f"disturbed-{number}.json")
    (folder / metric_lines.FILE_NAME).replace(folder / f"disturbed-{number}.jsonl")
    return [*(row["reruns"] or ()), measurement_of(row)]


def put_back(folder: Path, row: Row, failed: Row) -> Row:
    """Restore the disturbed measurement of `row`, as the one after it has failed."""
    number = len(failed["reruns"])
    (folder / f"disturbed-{number}.json").unlink()
    (folder / f"disturbed-{number}.jsonl").replace(folder / metric_lines.FILE_NAME)
    return {**row, "reruns": [*(row["reruns"] or ()), measurement_of(failed)]}


def measurement_of(row: Row) -> Measurement:
    """What a row lists about another measurement."""
    paths = ("memory.peak_bytes", "throughput.samples_per_s", "time.step_ms_p50")
    figures = {path.rpartition(".")[2]: value_at(row, path) for path in paths}
    return {"status": row["status"], "reason": row["reason"], "disturbed": row["disturbed"], **figures}
