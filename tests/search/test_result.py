"""How a search's winner is described."""

from __future__ import annotations

from lowvram.results.row import MIB, empty_row, merge
from lowvram.search.result import described


def test_a_step_of_seconds_is_given_in_plain_digits() -> None:
    plan = {"least_vram_bytes": 2 * MIB, "allocated_bytes": MIB, "step_ms": 1512.3}
    planned = merge(empty_row(), {"name": "x4", "plan": plan})
    assert described(planned) == "x4: needs 2.00 MiB, about 1510 ms a step, as planned"
    figures = {"time": {"step_ms_p50": 1234.5}, "throughput": {"samples_per_s": 8.0}, "memory": {"peak_bytes": MIB}}
    assert "1230 ms a step (planned 1510)" in described(merge(planned, figures))
