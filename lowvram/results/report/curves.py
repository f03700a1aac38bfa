"""The loss of a point over steps, time and samples, read from its `metrics.jsonl`. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.results.columns import value_at
from lowvram.results.metric_lines import FILE_NAME, read_lines
from lowvram.results.row import Row

NUM_KEPT = 200  # values of one curve: a screen shows no more
MOST_READ = 4000  # lines of one log; of a longer one evenly spaced lines are read
LOSS, STEP_MS = "loss/train", "time/step_ms"
SEEN = "data/samples"  # logged where batches grow


@dataclass(frozen=True)
class Curve:
    """The training loss, with the time and the samples or tokens up to each value. Empty where nothing was logged.

    `seconds`: spent in steps, without set-up, evaluations and snapshots; None where no step was timed.
    `seen`: samples or tokens trained on, in the unit of `per_sample`.
    `num_damaged`: lines of the log that can't be read, among those that were read.
    """

    loss: tuple[float, ...] = ()
    seconds: tuple[float, ...] | None = None
    seen: tuple[float, ...] | None = None
    num_damaged: int = 0


def curve(folder: Path, row: Row, per_sample: float | None, batch_size: int | None) -> Curve:
    """The curve of the point in `folder`, thinned evenly to at most `NUM_KEPT` values, the last one among them.

    Where the log doesn't time its steps (mode=measure) each one counts as the median step.
    """
    try:
        lines = read_lines(folder / FILE_NAME, MOST_READ)
    except OSError:  # a file that isn't our log
        return Curve()
    logged = [line for line in lines.rows if line.get(LOSS) is not None]
    stride = -(-len(logged) // NUM_KEPT) or 1
    kept = range((len(logged) - 1) % stride, len(logged), stride)
    times = _seconds(logged, value_at(row, "time.step_ms_p50"))
    return Curve(
        tuple(float(f"{logged[i][LOSS]:.5g}") for i in kept),
        None if times is None else tuple(round(times[i], 3) for i in kept),
        tuple(round(_samples(logged[i], batch_size) * per_sample) for i in kept) if batch_size and per_sample else None,
        lines.num_damaged,
    )


def _samples(line: dict[str, Any], batch_size: int) -> float:
    """Trained on up to the end of a logged step."""
    return line.get(SEEN) or line["step"] * batch_size


def _seconds(logged: Sequence[dict[str, Any]], step_ms: float | None) -> list[float] | None:
    """Time of all steps up to the end of each logged one; None if no step was timed."""
    seconds, before, times = 0.0, 0, []
    for line in logged:
        last_ms = line.get(STEP_MS) or step_ms
        if last_ms is None:
            return None
        seconds += (line["step"] - before) * last_ms / 1000
        before = line["step"]
        times.append(seconds)
    return times
