"""scripts/benchmarks/plan_accuracy_emulated.py: its points, and what it says of rows that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowvram.planning.devices import device_names
from scripts.benchmarks.emulated_points import Point, emulated_points
from scripts.benchmarks.plan_accuracy_emulated import DRAWS, Asked, Books, asked, key_of, plan_all, try_budgets
from scripts.benchmarks.plan_accuracy_emulated_report import EmulatedReport
from scripts.benchmarks.plan_accuracy_points import TRANSFORMER, Spec

POINTS = [Point("h100", Spec(TRANSFORMER, name, [f"name={name}"])) for name in ("a", "b", "c", "d", "e", "f")]


def test_a_third_of_the_points_is_held_out() -> None:
    points = emulated_points()
    assert len(points) >= 120
    assert len({point.name for point in points}) == len(points)
    assert {point.card for point in points} <= set(device_names())
    for family in {point.spec.family for point in points}:
        chosen = [point for point in points if point.spec.family == family]
        assert 0.3 < sum(point.is_held_out for point in chosen) / len(chosen) < 0.6
    assert sum(point.spec.words[0] == "model=hf" for point in points) >= 2 * 20


def test_words() -> None:
    assert asked(["here", "cards=t4,h100", "most=3", "replan"]) == Asked(
        Path("here"), ("t4", "h100"), 3, 0, "", 0, True, False
    )
    assert asked(["print", "budgets=4"])[2:] == (0, 4, "", 0, False, False)
    assert asked(["drawn=9"]).folder.name == "drawn"
    assert asked(["meshes=9"]).folder.name == "meshes"


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_stays_and_is_held_out(draw: str) -> None:
    """Points of a longer draw begin with those of a shorter one."""
    points = asked([f"{draw}=40"]).points
    assert points[:9] == asked([f"{draw}=9"]).points
    assert len({point.name for point in points}) == 40
    assert all(point.is_held_out for point in points)
    assert {point.card for point in points} <= set(device_names())
    assert not {point.name for point in points} & {point.name for point in emulated_points()}


class FakeRuns:
    """Plans and runs nothing: a point takes 1,000 bytes, and runs out of memory under less."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []

    def run(self, name: str, words: list[str]) -> dict[str, Any]:
        self.ran.append(words)
        gib = float(words[-1].removeprefix("vram=").removesuffix("GiB"))
        return {"status": "ok" if gib * 2**30 >= 999 else "oom", "reason": None}

    def plan(self, points: dict[str, list[str]]) -> list[dict[str, Any]]:
        plan = {"allocated_bytes": 900, "reserved_bytes": 950, "process_bytes": None, "least_vram_bytes": 1000}
        return [{"status": "ok", "reason": None, "plan": plan, "model": {"parameters": 3}} for _ in points]


def report(books: Books) -> str:
    read = (book.read() for book in (books.predictions, books.measured, books.budgets))
    return "\n".join(EmulatedReport(POINTS, *read, key_of=key_of).lines())


def test_held_out_points_run_under_their_own_least_memory_and_under_less(tmp_path: Path) -> None:
    books, runs = Books(tmp_path), FakeRuns()
    plan_all(books.predictions, POINTS, runs, replans=False)  # pyright: ignore[reportArgumentType]
    for _ in range(2):  # the second time there is nothing left to run
        try_budgets(books.budgets, POINTS, books.predictions, runs, most=2)  # pyright: ignore[reportArgumentType]
    num_held_out = min(2, sum(point.is_held_out for point in POINTS))
    assert num_held_out
    assert len(runs.ran) == 2 * num_held_out
    page = report(books)
    assert f"under `vram=` 100% of `least_vram_bytes`: {num_held_out} of {num_held_out} ok." in page
    assert f"under `vram=` 95% of `least_vram_bytes`: {num_held_out} of {num_held_out} oom." in page


def test_a_new_plan_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    books = Books(tmp_path)
    for replans in (False, False, True):
        plan_all(books.predictions, POINTS, FakeRuns(), replans)  # pyright: ignore[reportArgumentType]
    assert len(books.predictions.path.read_text().splitlines()) == len(POINTS)


@pytest.mark.parametrize("peak_bytes", [900, 1000])
def test_the_report_tells_held_out_points_apart(tmp_path: Path, peak_bytes: int) -> None:
    books = Books(tmp_path)
    plan_all(books.predictions, POINTS, FakeRuns(), replans=False)  # pyright: ignore[reportArgumentType]
    for point in POINTS:
        line = {"key": key_of(point), "name": point.name, "time": "3", "status": "ok", "reason": None}
        books.measured.add({**line, "peak_bytes": peak_bytes if point.is_held_out else 900, "reserved_bytes": 950})
    num_held_out = sum(point.is_held_out for point in POINTS)
    page, error = report(books), 1 - 900 / peak_bytes
    assert f"| allocated, held out | {num_held_out} | {error:.1%}" in page
    assert f"| allocated, not held out | {len(POINTS) - num_held_out} | 0.0%" in page
    assert "emulated: memory only" in page.lower()
