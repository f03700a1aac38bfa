"""How a sweep's memory, throughput and loss depend on the size of its batches. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from lowvram.results.ablation import Settings
from lowvram.results.columns import value_at
from lowvram.results.row import Row, Status

BATCH, PARTS = ("train.batch_size",), ("accum", "accum.parts")  # settings of the sizes
STEPS = ("train.steps", "train.eval_every")  # settings that follow from the batch, where all have seen equally much


def batch_sizes(rows: Sequence[Row], differing: Sequence[Settings]) -> dict[str, Any] | None:
    """Of each point the size that was swept, of the batch or else of its parts, and what else was swept, which makes a
    line of the chart; None if the points that ran to their end have one size. Over the batch also the median of the
    noise scales that the points have measured."""
    batch = [value_at(row, "config.train.batch_size") for row in rows]
    parts = [(row["config"].get("accum") or {}).get("parts") or 1 for row in rows]
    of_parts = [size and size / number for size, number in zip(batch, parts, strict=True)]
    finished = [i for i, row in enumerate(rows) if row["status"] == Status.OK]
    of_batch = (*BATCH, *STEPS) if have_seen_equally_much([rows[i] for i in finished]) else BATCH
    noise = noise_scale([rows[i] for i in finished])
    for title, sizes, names, mark in (
        ("samples of a batch", batch, of_batch, noise),
        ("samples at a time", of_parts, PARTS, None),
    ):
        if len({sizes[i] for i in finished if sizes[i]}) > 1:
            lines = [", ".join(value for name, value in each.items() if name not in names) for each in differing]
            return {"title": title, "sizes": sizes, "lines": lines, "noise_scale": mark}
    return None


def have_seen_equally_much(rows: Sequence[Row]) -> bool:
    """Whether the runs have seen equally many samples, up to one batch."""
    pairs = [(value_at(row, "config.train.batch_size"), num_steps(row)) for row in rows]
    known = [(size, size * steps) for size, steps in pairs if size and steps]
    seen = [samples for _, samples in known]
    is_known = 0 < len(known) == len(rows)
    return is_known and max(seen) - min(seen) <= max(size for size, _ in known)


def num_steps(row: Row) -> float | None:
    """Those that a training run has made, which may have ended early; else those that were asked for."""
    return value_at(row, "training.steps") or value_at(row, "config.train.steps")


def noise_scale(rows: Sequence[Row]) -> float | None:
    """The median of those that were measured, in samples."""
    measured = [value for row in rows if (value := value_at(row, "gradient.noise_scale")) is not None]
    return median(measured) if measured else None
