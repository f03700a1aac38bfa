"""Sweeps of many points: what is looked at before the first of them, and what is told at its turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from lowvram.cli.sweep import NUM_CHECKED, representative
from lowvram.planning import client as planning
from tests.calls import TINY, Outcome

Call = Callable[..., Outcome]
PLAN = ("-m", *TINY, "mode=plan", "plan.device=rtx3060")


def test_of_few_points_all_are_checked() -> None:
    assert representative([["seed=1"], ["seed=2"], ["seed=3"]]) == [0, 1, 2]


def test_few_points_hold_every_option_of_a_grid() -> None:
    options = [["precision=fp32", "precision=bf16"], [f"ckpt=every{n}" for n in range(1, 6)], ["accum=x2", "accum=x4"]]
    batch = [list(words) for words in product(*options, [f"seed={n}" for n in range(100)])]
    places = representative(batch)
    assert len(places) == NUM_CHECKED
    checked = {word for place in places for word in batch[place]}
    assert checked >= {word for words in options for word in words}


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Hydra has composed so far for points, where few are looked at before the first."""
    found: list[Any] = []
    inner = ConfigLoaderImpl.load_sweep_config

    def compose(self: ConfigLoaderImpl, config: Any, words: list[str]) -> Any:
        found.append(words)
        return inner(self, config, words)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", compose)
    monkeypatch.setattr(representative, "__defaults__", (2,))
    return found


@pytest.mark.slow
def test_a_sweep_starts_soon_and_composes_no_point_twice(
    call: Call, composed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each: list[int] = []
    inner = planning.Plans.row

    def row(self: planning.Plans, point: Any) -> Any:
        try:
            return inner(self, point)
        finally:
            before_each.append(len(composed))

    monkeypatch.setattr(planning.Plans, "row", row)
    outcome = call(*PLAN, "seed=range(12)")
    assert outcome.code == 0, outcome.said()
    assert set(outcome.statuses.values()) == {"ok"}
    assert len(outcome.statuses) == len(composed) == 12
    assert before_each[0] == planning.FIRST_AHEAD
    assert [line for line in outcome.out.splitlines() if "started" in line] == [
        "planning: started, 8 points",
        "planning: started, 4 points",
    ]


def test_a_mistake_in_one_value_of_many_costs_its_point(call: Call, composed: list[Any]) -> None:
    outcome = call(*PLAN, "train.batch_size=4,8,-1,2")
    assert outcome.statuses == {
        "batch_size4": "ok",
        "batch_size8": "ok",
        "batch_size-1": "incompatible",
        "batch_size2": "ok",
    }
    assert outcome.rows["batch_size-1"]["reason"] == "train.batch_size=-1: must be at least 1"
    assert outcome.code == 0
    assert "Traceback" not in outcome.out + outcome.err


def test_what_hydra_cannot_compose_ends_the_sweep_and_costs_no_row(call: Call, composed: list[Any]) -> None:
    outcome = call(*PLAN, "precision=fp32,bf16,nope")
    assert outcome.code == 3, outcome.said()
    assert outcome.statuses == {"fp32": "ok", "bf16": "ok"}
    assert outcome.err.startswith("precision=nope: must be one of")
    (table,) = Path(outcome.cwd).glob("outputs/sweeps/*/*/table.md")
    assert "bf16" in table.read_text()
