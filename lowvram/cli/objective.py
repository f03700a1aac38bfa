"""What a sweep optimises, optimized_metric=memory.peak_bytes: figures of a row, each in the direction that is better.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

from omegaconf import ListConfig

from lowvram.config.errors import BadInput, Refused
from lowvram.results.metrics import METRICS, Better, Metric
from lowvram.results.row import Row, Status, size_text
from lowvram.results.row_fields import at

KEY = "optimized_metric"
Direction = Literal["minimize", "maximize"]


@final
@dataclass(frozen=True)
class Objective:
    """One or several figures of a row."""

    metrics: tuple[Metric, ...]

    @classmethod
    def named(cls, value: Any) -> Objective:
        """The figures that `optimized_metric` names: a path, or a list of them.

        Raises:
            BadInput: one isn't a figure of which a smaller or a larger one is better.
        """
        known = {metric.path: metric for metric in METRICS if metric.better is not Better.NEITHER}
        paths = list(value) if isinstance(value, ListConfig | list) else [value]
        for path in paths or [None]:
            if path not in known:
                raise BadInput(KEY, path, f"a figure of a row, or a list of some: {', '.join(known)}")
        return cls(tuple(known[path] for path in paths))

    @property
    def directions(self) -> list[Direction]:
        """As Optuna calls them."""
        return ["maximize" if metric.better is Better.LARGER else "minimize" for metric in self.metrics]

    def values(self, row: Row) -> list[float]:
        """The figures of a row that ended well; none of another's.

        Raises:
            Refused: points like this one don't have such a figure.
        """
        if row["status"] != Status.OK:
            return []
        values = [at(row, metric.path) for metric in self.metrics]
        for metric, value in zip(self.metrics, values, strict=True):
            if value is None:
                mode = row["choices"]["mode"]
                raise Refused(f"{KEY}={metric.path}: must be a figure of the points; with mode={mode} they have none")
        return [float(value) for value in values if value is not None and math.isfinite(value)]

    def text(self, values: list[float]) -> str:
        """The figures for a reader."""
        texts = [
            f"{metric.path} {size_text(value) if metric.is_size else metric.format.alone(value)}"
            for metric, value in zip(self.metrics, values, strict=True)
        ]
        return ", ".join(texts)
