"""scripts/benchmarks/bench_search.py: what it says of grids and searches that were made up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.bench_search import (
    MIB,
    NUM_RIVALS,
    NUM_ROUNDS,
    Bench,
    Book,
    Moment,
    Timed,
    budgets,
    now,
    others_share,
    rate,
)
from scripts.benchmarks.bench_search_report import Point, Probe, Result, lines, lost, ranks
from scripts.benchmarks.runs import Runs


def point(name: str, samples_per_s: float, grown_mib: int = 100) -> Point:
    return Point([name], samples_per_s, grown_mib * MIB, 0.0)


def result(rates: dict[str, list[float]], probes: Sequence[Probe] = ()) -> Result:
    return Result("1GiB", 2, rates, next(iter(rates)), [*probes], 0.25, "-")


def plan(step_ms: float, least_mib: int, fits: bool) -> dict[str, Any]:
    return {"step_ms": step_ms, "least_vram_bytes": least_mib * MIB, "margin": 0.1, "fits": fits}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Runs(tmp_path), tmp_path, "transformer", 1.0)


def test_budgets_lie_evenly_between_the_smallest_and_the_largest_process() -> None:
    assert budgets([point("a", 1.0, 100), point("b", 2.0, 300), point("c", 3.0, 110)]) == ["150MiB", "200MiB", "250MiB"]


def test_the_best_has_the_highest_median_and_shares_are_those_of_rounds() -> None:
    found = result({"pick": [8.0, 10.0, 90.0], "rival": [16.0, 20.0, 20.0], "other": [1.0, 1.0, 99.0]})
    assert found.best == "rival"
    assert found.shares == [0.5, 0.5, 4.5]


def test_a_pick_that_is_the_best_has_all_of_it() -> None:
    assert result({"pick": [3.0, 4.0], "rival": [2.0, 2.0]}).shares == [1.0, 1.0]


def test_points_are_tried_from_the_fastest_on_until_enough_have_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Bench, words: Sequence[str], *more: str) -> Any:
        assert "vram=1GiB" in more
        return {"status": "oom" if words[0] == "large" else "ok"}

    monkeypatch.setattr(Bench, "run", run)
    names = ["slowest", *(f"fitting {number}" for number in range(NUM_RIVALS)), "large"]
    tried = list(bench.tried("1GiB", [point(name, speed) for speed, name in enumerate(names, 1)]))
    assert [(one.name, ran) for one, ran in tried] == [
        ("large", False),
        *((f"fitting {number}", True) for number in reversed(range(NUM_RIVALS))),
    ]


PLANS = {
    "a": plan(10.0, 100, fits=True),
    "b": plan(20.0, 100, fits=True),
    "c": plan(5.0, 200, fits=False),
}


@pytest.mark.parametrize(
    ("rates", "probes", "told"),
    [
        ({"a": [2.0]}, "a", "-"),
        ({"outside": [2.0]}, "outside", "-"),  # accum=x32 is searched, and not in the grid
        ({"a": [2.0], "b": [3.0]}, "ab", "probed, and slower there"),
        ({"a": [2.0], "b": [3.0]}, "a", "predicted too slow: 2 of 2 that fit by their plans"),
        ({"a": [2.0], "c": [3.0]}, "a", "planned too large: 0.215 GiB, its margin of 10% included"),
    ],
)
def test_it_is_reported_where_the_best_was_lost(rates: dict[str, list[float]], probes: str, told: str) -> None:
    found = result(rates, [Probe(name, "ok", MIB) for name in probes])
    assert lost(found, PLANS) == told


def test_contenders_are_measured_in_turns_each_round_in_the_other_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def timed(_: Bench, words: Sequence[str], *more: str) -> Timed:
        assert more == ("vram=1GiB",)
        order.append(words[0])
        return Timed(float(len(order)), MIB, 0.0)

    monkeypatch.setattr(Bench, "timed", timed)
    found = bench.in_turns("1GiB", [["a"], ["b"]])
    assert "".join(order) == ("abba" * NUM_ROUNDS)[: 2 * NUM_ROUNDS]
    assert [one.samples_per_s for one in found["a"]] == [place for place, name in enumerate(order, 1) if name == "a"]


def test_what_was_measured_of_a_budget_is_not_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(_: Bench, vram: str, grid: object) -> Result:
        searched.append(vram)
        return result({"a": [2.0]}, [Probe("a", "oom", None)])._replace(vram=vram)

    monkeypatch.setattr(Bench, "searched", search)
    grid = [point("a", 1.0, 100), point("b", 2.0, 300)]
    first, second = bench.searches(grid), bench.searches(grid)
    assert first == second
    assert searched == budgets(grid)


def test_a_book_keeps_its_lines(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    assert book.lines() == []
    book.add({"a": 1})
    book.add({"b": 2})
    assert book.lines() == [{"a": 1}, {"b": 2}]


def test_the_report_says_what_became_of_the_pick_and_its_probes() -> None:
    found = result({"a": [2.0, 4.0], "b": [4.0, 4.0]}, [Probe("a", "ok", 512 * MIB), Probe("b", "oom", None)])
    grid = [point("a", 2.0), point("b", 1.0), point("c", 4.0)]
    text = "\n".join(lines("transformer", grid, [found], PLANS))
    assert "predicted and measured times: 1.00." in text
    assert "| 1GiB | 2 of 3 | a | b | 75.0% (50.0% to 100.0%) | - |" in text
    assert "| 1GiB | 2 | 1 | 0.500 GiB |" in text
    assert "| 1GiB | a | 3.00 (2.00, 4.00) | 25% |" in text


def test_a_rate_is_that_of_the_median_step_in_the_time_that_others_left() -> None:
    row: Any = {"status": "ok", "config": {"train": {"batch_size": 16}}, "time": {"step_ms_p50": 1000.0}}
    assert rate(row, 0.0) == 16
    assert rate(row, 0.5) == 32
    assert rate({**row, "status": "oom"}, 0.0) is None


def test_what_others_take_is_what_is_left_of_the_busy_time() -> None:
    start, end = Moment(100.0, 50.0, 10.0), Moment(110.0, 65.0, 20.0)
    assert others_share(start, end, 1) == 0.5
    assert others_share(start, end, 2) == 0.25
    assert others_share(start, end._replace(own_s=26.0), 1) == 0.0  # ticks are counted late


def test_time_of_this_process_is_what_it_computes() -> None:
    start = now()
    time.sleep(0.3)
    slept = now()
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    end = now()
    assert slept.clock_s - start.clock_s >= 0.3
    assert slept.own_s - start.own_s < 0.2
    assert end.own_s - slept.own_s >= 0.3
    assert end.busy_s - slept.busy_s >= 0.25  # which is counted in ticks of 10 ms


def test_ranks_are_places_in_order() -> None:
    assert ranks([30.0, 10.0, 20.0]) == [2, 0, 1]
