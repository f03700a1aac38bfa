"""measure.reruns: a point whose measurement was disturbed is measured again, in fresh processes. Imports no torch.

Every measurement is kept: what the row was lies in `disturbed-1.json`, its log in `disturbed-1.jsonl`, and the row
lists them. The first one that nothing disturbed counts, else the last one, however fast the others were: the best of
several would be another figure.
"""

from __future__ import annotations

from pathlib import Path

from lowvram.launch.point import Measurement
from lowvram.results import metrics
from lowvram.results.columns import value_at
from lowvram.results.row import Row, Status, write

MODE = "measure"  # conf/mode/measure.yaml


def is_due(row: Row) -> bool:
    """Whether the measurement of `row` is to be made again."""
    is_measured = row["status"] == Status.OK and row["choices"]["mode"] == MODE
    return is_measured and bool(row["disturbed"]) and len(row["reruns"] or ()) < row["config"]["measure"]["reruns"]


def set_aside(folder: Path, row: Row) -> list[Measurement]:
    """Keep a disturbed measurement of the point in `folder`; returns what the next row lists of all such."""
    number = len(row["reruns"] or ()) + 1
    write(folder, row, f"disturbed-{number}.json")
    (folder / metrics.FILE_NAME).replace(folder / f"disturbed-{number}.jsonl")
    return [*(row["reruns"] or ()), measurement_of(row)]


def put_back(folder: Path, row: Row, failed: Row) -> Row:
    """The disturbed measurement of `row` stands, as the one after it has failed."""
    number = len(failed["reruns"])
    (folder / f"disturbed-{number}.json").unlink()
    (folder / f"disturbed-{number}.jsonl").replace(folder / metrics.FILE_NAME)
    return {**row, "reruns": [*(row["reruns"] or ()), measurement_of(failed)]}


def measurement_of(row: Row) -> Measurement:
    """What a row lists of another one."""
    paths = ("memory.peak_bytes", "throughput.samples_per_s", "time.step_ms_p50")
    figures = {path.rpartition(".")[2]: value_at(row, path) for path in paths}
    return {"status": row["status"], "reason": row["reason"], "disturbed": row["disturbed"], **figures}
