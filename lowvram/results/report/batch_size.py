"""How a sweep's memory, throughput and loss depend on the size of its batches. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowvram.results.ablation import Settings
from lowvram.results.columns import value_at
from lowvram.results.row import Row, Status

BATCH, PARTS = ("train.batch_size",), ("accum", "accum.parts")  # settings of the sizes


def batch_sizes(rows: Sequence[Row], differing: Sequence[Settings]) -> dict[str, Any] | None:
    """Of each point the size that was swept, of the batch or else of its parts, and what else was swept, which makes a
    line of the chart; None if the points that ran to their end have one size."""
    batch = [value_at(row, "config.train.batch_size") for row in rows]
    parts = [(row["config"].get("accum") or {}).get("parts") or 1 for row in rows]
    of_parts = [size and size / number for size, number in zip(batch, parts, strict=True)]
    finished = [i for i, row in enumerate(rows) if row["status"] == Status.OK]
    for title, sizes, names in (("samples of a batch", batch, BATCH), ("samples at a time", of_parts, PARTS)):
        if len({sizes[i] for i in finished if sizes[i]}) > 1:
            lines = [", ".join(value for name, value in each.items() if name not in names) for each in differing]
            return {"title": title, "sizes": sizes, "lines": lines}
    return None
