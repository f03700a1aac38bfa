"""price_per_hour: what a run costs, planned and measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.calls import TINY, Outcome, read_row
from tests.refusals import refusal

Call = Callable[..., Outcome]


def test_a_plan_says_what_all_updates_cost(call: Call) -> None:
    plan = call("mode=plan", *TINY, "plan.device=rtx3060", "price_per_hour=0.5", "train.steps=1200").row["plan"]
    assert plan["num_steps"] == 1200
    assert plan["cost"] == pytest.approx(0.5 * 1200 * plan["step_ms"] / 3.6e6)


def test_a_runs_cost_counts_its_ranks_and_not_for_its_id(call: Call) -> None:
    outcome = call(*TINY, "device=cpu", "sharding=ddp", "sharding.ranks=2", "price_per_hour=360")
    row = outcome.row
    assert row["cost"]["total"] == pytest.approx(360 * 2 * row["time"]["total_s"] / 3600, rel=1e-2)
    assert "cost: total " in outcome.out
    free = call(*TINY, "device=cpu", "sharding=ddp", "sharding.ranks=2").row
    assert free["cost"] == {"total": None}
    assert "cost" not in free["plan"]
    assert free["id"] == row["id"]


def test_each_point_of_a_sweep_has_its_own(call: Call) -> None:
    outcome = call("-m", *TINY, "device=cpu", "seed=0,1", "price_per_hour=0.35")
    assert all(read_row(folder)["cost"]["total"] > 0 for folder in outcome.folders)
    assert " cost |" in outcome.out
    assert "cost" in (outcome.folders[0].parent / "report.html").read_text()


@pytest.mark.parametrize("price", ["-1", "inf", "nan", "cheap"])
def test_a_price_that_is_none_is_refused(price: str) -> None:
    assert "price_per_hour=" in refusal(*TINY, f"price_per_hour={price}")
