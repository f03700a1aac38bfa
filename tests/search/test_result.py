"""How a search's winner is described."""

from __future__ import annotations

from lowvram.results.row import MIB, empty_row, merge
from lowvram.search.result import described


def test_a_step_of_seconds_is_given_in_plain_digits() -> None:
    plan = {"least_vram_bytes": 2 * MIB, "allocated_bytes": MIB, "step_ms": 1512.3, "fits": True}
    planned = merge(empty_row(), {"name": "x4", "plan": plan})
    assert described(planned) == "x4: needs 2.00 MiB, about 1510 ms a step, as planned"
    figures = {"time": {"step_ms_p50": 1234.5}, "throughput": {"samples_per_s": 8.0}, "memory": {"peak_bytes": MIB}}
    assert "1230 ms a step (planned 1510)" in described(merge(planned, figures))


def test_a_winner_that_fits_only_without_its_margin_is_said_to_have_run() -> None:
    plan = {"least_vram_bytes": 2 * MIB, "allocated_bytes": MIB, "step_ms": 12.0, "fits": False}
    figures = {"time": {"step_ms_p50": 12.0}, "throughput": {"samples_per_s": 8.0}, "memory": {"peak_bytes": MIB}}
    measured = merge(merge(empty_row(), figures), {"name": "x4", "plan": plan, "config": {"vram": "2MiB"}})
    text = described(measured)
    assert text.endswith("8 samples/s; it ran under vram=2MiB, though its plan doesn't fit with its margin")
    assert "margin" not in described(merge(measured, {"plan": {"fits": True}}))
