"""What is planned stands beside what is measured, and what can't fit by far need not run."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from lowvram.planning.client import Plans, is_far_off, plan_for_row, time_for
from lowvram.results.terminal import QuietProgress
from tests.calls import TINY, TINY_RESNET, Outcome, read_row

Call = Callable[..., Outcome]
LARGE = [*TINY, "train.batch_size=256", "data.sequence_length=64"]


@pytest.mark.parametrize("words", [TINY, TINY_RESNET], ids=["transformer", "resnet"])
def test_a_run_has_its_plan_beside_it(call: Call, words: tuple[str, ...]) -> None:
    outcome = call(*words, "device=cpu")
    assert outcome.code == 0, outcome.said()
    plan, memory = outcome.row["plan"], outcome.row["memory"]
    assert plan["device"] == "cpu"
    assert plan["allocated_bytes"] == pytest.approx(memory["peak_bytes"], rel=0.01)
    assert " of live tensor bytes on CPU, planned " in outcome.out
    assert "plan for" not in outcome.out  # the whole plan is for those who ask for it


def test_a_run_is_planned_for_where_it_runs(call: Call) -> None:
    """Not for the device that plans are for."""
    assert call(*TINY, "device=cpu", "plan.device=rtx3060").row["plan"]["device"] == "cpu"


def test_a_sweep_is_planned_before_its_first_point(call: Call) -> None:
    outcome = call("-m", *TINY, "mode=measure", "device=cpu", "ckpt=none,every1", "accum=none,x2")
    assert outcome.code == 0, outcome.said()
    rows = [read_row(folder) for folder in outcome.folders]
    assert len(rows) == 4
    for row in rows:
        assert row["plan"]["allocated_bytes"] == pytest.approx(row["memory"]["peak_bytes"], rel=0.01)
    assert outcome.out.count("planning: started, 4 points") == 1
    assert "planned MiB" in outcome.out


def test_ranks_are_planned_as_such(call: Call) -> None:
    row = call(*TINY, "mode=measure", "device=cpu", "sharding=fsdp", "sharding.ranks=2").row
    assert row["plan"]["allocated_bytes"] == pytest.approx(row["memory"]["peak_bytes"], rel=0.05)


def test_what_cannot_fit_by_far_is_reported_and_runs_all_the_same(call: Call) -> None:
    outcome = call(*LARGE, "vram=24MiB")
    assert outcome.row["status"] == "oom"
    assert outcome.row["plan"]["fits"] is False
    assert (
        "planned to need more than 1.25 times the memory allowed (plan.skip=true skips such points): it needs "
        in outcome.out
    )


@pytest.mark.slow
def test_what_cannot_fit_by_far_is_skipped_on_demand(call: Call) -> None:
    """And runs when the same sweep is called again without that."""
    sweep = ["-m", *LARGE, "device=cpu", "vram=64MiB", "accum=none,x32", "hydra.sweep.dir=sweep"]
    outcome = call(*sweep, "plan.skip=true")
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"none": "skipped", "x32": "ok"}
    assert "of 64.00 MiB" in outcome.rows["none"]["reason"] or "of 0.062 GiB" in outcome.rows["none"]["reason"]
    assert "to run what is missing" not in outcome.out
    assert "none needs " in outcome.out
    again = call(*sweep)
    assert again.statuses == {"none": "oom", "x32": "ok"}
    assert again.rows["x32"]["provenance"]["command"] == outcome.rows["x32"]["provenance"]["command"]  # kept


def test_a_single_run_is_skipped_as_well(call: Call) -> None:
    outcome = call(*LARGE, "vram=24MiB", "plan.skip=true")
    assert outcome.code == 1
    assert outcome.row["status"] == "skipped"
    assert outcome.row["reason"].startswith("planned to need ")


def test_far_off_is_far_beyond_the_margin() -> None:
    assert is_far_off({"least_vram_bytes": 126, "budget_bytes": 100, "grows": False})
    assert not is_far_off({"least_vram_bytes": 126, "budget_bytes": 100, "grows": True})
    assert not is_far_off({"least_vram_bytes": 124, "budget_bytes": 100, "grows": False})
    assert not is_far_off({"least_vram_bytes": 126, "budget_bytes": None, "grows": False})
    assert not is_far_off({"reason": "can't plan this model"})
    assert not is_far_off(None)


def test_a_plan_that_fails_costs_no_point_its_row() -> None:
    assert plan_for_row({"status": "ok", "plan": {"allocated_bytes": 3}}) == {"allocated_bytes": 3}
    assert plan_for_row({"status": "error", "reason": "can't plan this model"}) == {"reason": "can't plan this model"}
    unplanned = {"status": "error", "reason": "can't plan this model", "advice": "try accum=x8"}
    assert plan_for_row(unplanned) == {"reason": "can't plan this model", "advice": "try accum=x8"}
    assert plan_for_row({"status": "incompatible", "reason": "the point tells it itself"}) is None
    assert plan_for_row(None) is None


def test_planning_takes_no_longer_than_running_may() -> None:
    def point(is_real: bool, timeout_s: float | None) -> dict[str, object]:
        return {"config": {"timeout_s": timeout_s}, "is_real": is_real}

    assert time_for([point(True, 3.0), point(True, 4.0)]) == 7.0
    assert time_for([point(True, 3.0), point(True, None)]) is None
    assert time_for([point(False, 3.0)]) is None


class Dying:
    """A fork server whose planning process dies after the first point, so many times."""

    def __init__(self, num_deaths: int) -> None:
        self.num_deaths, self.asked = num_deaths, list[int]()

    def ask(
        self,
        name: str,
        asked: dict[str, Any],
        order: object,
        on_event: Callable[[dict[str, Any]], None],
        tries: int = 1,
    ) -> dict[str, Any]:
        assert name == "plan"
        self.asked.append(len(asked["points"]))
        for index in range(1 if len(self.asked) <= self.num_deaths else self.asked[-1]):
            on_event(
                {
                    "event": "planned",
                    "index": index,
                    "fields": {"status": "ok", "plan": {"of": asked["points"][index]["of"]}},
                }
            )
        return {}


@pytest.mark.parametrize(("num_deaths", "asked", "known"), [(0, [3], "abc"), (1, [3, 2], "abc"), (2, [3, 2], "ab")])
def test_what_was_planned_by_a_process_that_was_killed_is_planned_once_more(
    num_deaths: int, asked: list[int], known: str
) -> None:
    server: Any = Dying(num_deaths)
    plans = Plans(server, QuietProgress(io.StringIO()), lambda: 0)
    plans.ask(
        {place: {"of": name, "is_real": False, "config": {"timeout_s": None}} for place, name in enumerate("abc")}
    )
    assert server.asked == asked
    assert "".join(told["plan"]["of"] for _, told in sorted(plans.planned.items()) if told["status"] == "ok") == known
    assert {told["status"] for told in plans.planned.values()} == ({"ok"} if known == "abc" else {"ok", "killed"})


class Interrupted(Dying):
    """The same, but somebody sends the planning process a signal, and it says so."""

    def ask(
        self,
        name: str,
        asked: dict[str, Any],
        order: object,
        on_event: Callable[[dict[str, Any]], None],
        tries: int = 1,
    ) -> dict[str, Any]:
        super().ask(name, asked, order, on_event)
        is_told = len(self.asked) <= self.num_deaths
        return {"status": "interrupted", "reason": "stopped by a signal"} if is_told else {}


@pytest.mark.parametrize(("is_stopped", "asked"), [(False, [3, 2]), (True, [3])])
def test_a_signal_to_the_planning_process_alone_takes_nobody_s_plan(is_stopped: bool, asked: list[int]) -> None:
    server: Any = Interrupted(1)
    plans = Plans(server, QuietProgress(io.StringIO()), lambda: int(is_stopped))
    plans.ask({place: {"of": "a", "is_real": False, "config": {"timeout_s": None}} for place in range(3)})
    assert server.asked == asked
    assert len(plans.planned) == (1 if is_stopped else 3)
