"""One line of advice for a point that waited for its data. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

_LEAST_SHARE = 0.1  # of the time


def data_wait_advice(data_wait_frac: float | None, choices: Mapping[str, str]) -> str | None:
    """A line when more than a tenth of the time was spent waiting for data, None otherwise."""
    if data_wait_frac is None or not data_wait_frac > _LEAST_SHARE or choices.get("loader") != "inline":
        return None
    limit = " (loader.num_workers=1 for an iterable dataset)" if choices.get("data") == "external" else ""
    return f"{100 * data_wait_frac:.0f} % of the time was spent waiting for data: try loader=workers{limit}"
