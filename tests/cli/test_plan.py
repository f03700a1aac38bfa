"""mode=plan from the command line: no point runs, and all are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import TINY, Outcome, read_row
from tests.refusals import refusal

Call = Callable[..., Outcome]
GIB = 2**30
PLAN = ["mode=plan", *TINY]


def test_a_plan_says_what_a_point_would_hold(call: Call) -> None:
    outcome = call(*PLAN, "plan.device=rtx3060", "vram=1GiB")
    plan = outcome.row["plan"]
    assert outcome.code == 0
    assert outcome.row["status"] == "ok"
    assert outcome.row["model"]["parameters"] > 0
    assert outcome.row["memory"]["peak_bytes"] is None  # nothing ran
    assert plan["device"] == "rtx3060"
    assert plan["fits"] is True
    assert 0 < plan["allocated_bytes"] <= plan["reserved_bytes"] <= plan["least_vram_bytes"] * 2
    assert sum(plan["by_kind"].values()) <= plan["allocated_bytes"]
    assert "plan for rtx3060" in outcome.out
    assert "fits into 1.000 GiB: needs at least" in outcome.out
    assert not (outcome.folder / "wandb").exists()


def test_a_budget_that_is_too_small_is_no_failure(call: Call) -> None:
    outcome = call(*PLAN, "plan.device=t4", "vram=1MiB")
    assert outcome.code == 0
    assert outcome.row["plan"]["fits"] is False
    assert "does not fit into 1.00 MiB: needs at least" in outcome.out
    assert outcome.row["plan"]["advice"] in outcome.out
    assert " % of the peak: try " in outcome.row["plan"]["advice"]


@pytest.mark.slow
def test_a_sweep_of_plans_is_one_table(call: Call) -> None:
    outcome = call("-m", *PLAN, "plan.device=rtx3060", "ckpt=none,every1", "precision=fp32,tf32", "accum=none,x2")
    assert outcome.code == 0
    found = {row["name"]: row["plan"]["allocated_bytes"] for row in map(read_row, outcome.folders)}
    assert len(found) == 8
    assert found["none-fp32-x2"] < found["none-fp32-none"]
    assert found["every1-fp32-none"] <= found["none-fp32-none"]
    assert "planned MiB" in outcome.out
    assert "least vram MiB" in outcome.out
    assert (outcome.folders[0].parent / "table.md").exists()
    assert "planned memory" in (outcome.folders[0].parent / "report.html").read_text()


def test_what_the_planned_device_cannot_do_is_reported_before_anything_is_bought(call: Call) -> None:
    outcome = call("-m", *PLAN, "plan.device=t4", "precision=bf16,fp16")
    rows = [read_row(folder) for folder in outcome.folders]
    assert [row["status"] for row in rows] == ["incompatible", "ok"]
    assert (
        rows[0]["reason"]
        == "precision=bf16 needs that the device computes in bf16: t4 only emulates it: use precision=fp16"
    )
    refused = call(*PLAN, "plan.device=t4", "precision=bf16")
    assert refused.code == 3
    assert refused.err.strip() == rows[0]["reason"]


def test_bad_input_is_one_sentence() -> None:
    for word, sentence in {
        "plan.device=rtx9": "plan.device='rtx9': must be one of ",
        "plan.margin=-1": "plan.margin=-1.0: must be null or a share from 0",
        "vram=lots": "vram='lots': must be null or a number above 0 with a unit",
        "accum=x5": "accum=x5",
        "plan.budget=3": "plan.budget",
    }.items():
        assert sentence in refusal(*PLAN, word)


def test_a_device_of_ones_own(call: Call, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"names: [Mine]\ncompute_capability: '8.6'\nmemory_bytes: {4 * GIB}\n")
    outcome = call(*PLAN, f"plan.device={mine}")
    assert outcome.row["plan"]["budget_bytes"] == 4 * GIB
