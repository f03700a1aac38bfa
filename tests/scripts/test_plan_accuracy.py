"""scripts/benchmarks/plan_accuracy.py: what it says of points that were made up, and what it does not do twice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from scripts.benchmarks.accuracy import Errors, Pair, Verdicts, errors_of, verdicts_of
from scripts.benchmarks.book import Book
from scripts.benchmarks.plan_accuracy import (
    CPU_QUANTITIES,
    CUDA_QUANTITIES,
    asked,
    by_name,
    freeze,
    key_of,
    measure,
)
from scripts.benchmarks.plan_accuracy_points import COMPILED, TRANSFORMER, Spec, cpu_points, cuda_points, spec
from scripts.benchmarks.plan_accuracy_report import Report

SPECS = [Spec(TRANSFORMER, name, [f"name={name}"]) for name in ("a", "b", "c")]


def test_errors_are_relative_to_what_was_measured() -> None:
    found = errors_of([Pair(110, 100), Pair(80, 100), Pair(100, 100)])
    assert found == pytest.approx(Errors(3, median=0.1, p95=0.19, largest=0.2, signed=0.0))


def test_one_point_and_none_have_errors_too() -> None:
    assert errors_of([Pair(95, 100)]) == pytest.approx(Errors(1, 0.05, 0.05, 0.05, -0.05))
    assert errors_of([]) is None


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (5, -1)])
def test_sizes_that_have_no_relative_error_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="above 0 bytes"):
        Pair(*sizes)


@pytest.mark.parametrize(
    ("planned", "margin", "wanted"),
    [
        (100, 0.0, Verdicts(2, 0, 0)),
        (85, 0.0, Verdicts(2, 1, 0)),
        (115, 0.0, Verdicts(2, 0, 1)),
        (85, 0.1, Verdicts(2, 0, 0)),  # the margin makes up for it
        (105, 0.1, Verdicts(2, 0, 1)),  # and refuses what would fit
    ],
)
def test_budgets_near_a_point_tell_false_fits_and_false_refusals(planned: int, margin: float, wanted: Verdicts) -> None:
    assert verdicts_of([Pair(planned, 100)], [0.9, 1.1], margin) == wanted


def predicted(name: str, num_bytes: int | None, time: str = "1", **more: Any) -> dict[str, Any]:
    line = {"name": name, "time": time, "status": "ok", "reason": None, "process_bytes": num_bytes}
    return {**line, "allocated_bytes": num_bytes, "mem_tracker_bytes": None, **more}


def measured(name: str, num_bytes: int | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "time": "2", "status": "ok", "reason": None, "process_peak_bytes": num_bytes, **more}


def report(predictions: Iterable[dict[str, Any]], rows: Iterable[dict[str, Any]], specs: list[Spec] = SPECS) -> str:
    planned, found = ({line["name"]: line for line in lines} for lines in (predictions, rows))
    return "\n".join(Report(specs, planned, found, CPU_QUANTITIES, {"tracker": "mem_tracker_bytes"}).lines())


def test_the_report_has_each_point_and_the_largest_error_first() -> None:
    sizes = {"a": 2**20, "b": 3 * 2**20, "c": 2 * 2**20}
    page = report([predicted(name, size) for name, size in sizes.items()], [measured(n, 2 * 2**20) for n in sizes])
    assert "| process growth | 3 | 50.0% | 50.0% | 50.0% | +0.0% |" in page
    assert "| `a` | 1.0 | 2.0 | -50.0% |" in page
    assert page.index("`a`") < page.index("`b`") < page.index("`c`")
    assert "| baseline: tracker | 0 | – | – | – | – |" in page
    assert "1 false fits and 2 false refusals in 9 with a margin of 0%" in page
    assert "Every point could be planned and ran." in page


def test_what_is_not_compared_says_why() -> None:
    predictions = [predicted("a", None, status="error", reason="can't plan this model: x.py:1"), predicted("b", 5)]
    page = report(
        [*predictions, predicted("c", 5)], [measured("a", 5), measured("b", None, status="oom", reason="big")]
    )
    assert "3 points, 0 of them planned and measured" in page
    assert "- `a`: not planned: can't plan this model: x.py:1" in page
    assert "- `b`: oom: big" in page
    assert "- `c`: not measured yet" in page


def test_a_prediction_that_is_younger_than_its_measurement_is_reported() -> None:
    assert "1 predictions are younger" in report([predicted("a", 5, time="3")], [measured("a", 5)])
    assert "younger" not in report([predicted("a", 5)], [measured("a", 5)])


def test_compiled_points_stand_apart() -> None:
    specs = [SPECS[0], Spec(COMPILED, "b", [])]
    page = report([predicted("a", 5), predicted("b", 9)], [measured("a", 5), measured("b", 5)], specs)
    first, second = page.split("## compiled")
    assert "| process growth | 1 | 0.0%" in first
    assert "| process growth | 1 | 80.0%" in second


class FakeRuns:
    """Plans and runs nothing, and remembers what was asked."""

    def __init__(self, status: str = "ok") -> None:
        self.status, self.ran, self.planned = status, list[str](), list[str]()

    def run(self, name: str, words: list[str]) -> dict[str, Any]:
        self.ran.append(name)
        memory = {"peak_bytes": 1, "reserved_bytes": None, "process_peak_bytes": 2}
        about = {"provenance": {"threads": 1}, "time": {"total_s": 0.1}, "reason": None}
        return {"status": self.status, "memory": memory, **about}

    def plan(self, points: dict[str, list[str]]) -> list[dict[str, Any]]:
        self.planned += points
        plan = {"allocated_bytes": 1, "reserved_bytes": None, "process_bytes": 2}
        return [{"status": "ok", "reason": None, "plan": plan, "model": {"parameters": 3}} for _ in points]


def book_of(folder: Path) -> Book:
    return Book(folder / "deep" / "lines.jsonl")


def run(book: Book, runs: Any, most: int | None = None) -> None:
    measure(book, SPECS, runs, [], most)


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    book, first, second = book_of(tmp_path), FakeRuns(), FakeRuns()
    run(book, first, most=2)
    run(book, second)
    assert (first.ran, second.ran) == (["a", "b"], ["c"])
    assert list(by_name(SPECS, book)) == ["a", "b", "c"]


def test_what_was_ended_from_outside_is_measured_again(tmp_path: Path) -> None:
    book, again, third = book_of(tmp_path), FakeRuns(), FakeRuns()
    run(book, FakeRuns("killed"))
    run(book, again)
    run(book, third)
    assert (again.ran, third.ran) == (["a", "b", "c"], [])
    assert {line["status"] for line in book.read().values()} == {"ok"}


def test_other_words_are_another_point(tmp_path: Path) -> None:
    book, runs = book_of(tmp_path), FakeRuns()
    run(book, runs)
    measure(book, [SPECS[0]._replace(words=["name=other"])], runs, [], None)  # pyright: ignore[reportArgumentType]
    assert runs.ran == ["a", "b", "c", "a"]


def test_predictions_stay_as_they_were_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.plan_accuracy.tracked", lambda runs, words: 7)
    book, runs = book_of(tmp_path), FakeRuns()
    for _ in range(2):
        freeze(book, SPECS, runs, [], "cpu", 6)  # pyright: ignore[reportArgumentType]
    assert runs.planned == ["a", "b", "c"]
    assert by_name(SPECS, book)["a"]["sixteen_bytes"] == 48
    assert by_name(SPECS, book)["a"]["mem_tracker_bytes"] == 7
    assert len(book.path.read_text().splitlines()) == 3


def test_a_torn_line_costs_one_point(tmp_path: Path) -> None:
    book, runs = book_of(tmp_path), FakeRuns()
    run(book, FakeRuns())
    text = book.path.read_text()
    book.path.write_text(text[:-20])
    run(book, runs)
    assert runs.ran == ["c"]
    assert len(book.read()) == 3
    assert json.loads(book.path.read_text().splitlines()[-1])["key"] == key_of(SPECS[2])


def test_points_have_names_of_their_own_and_families() -> None:
    for specs in (cpu_points(has_bf16=True), cuda_points()):
        assert len({each.name for each in specs}) == len({key_of(each) for each in specs}) == len(specs)
        assert sum(each.family == TRANSFORMER for each in specs) >= 40
    assert sum(each.family == TRANSFORMER for each in cpu_points(has_bf16=False)) >= 40
    assert not any("precision=" in word for each in cpu_points(has_bf16=False) for word in each.words)


def test_no_prediction_is_held_against_the_ledger() -> None:
    assert [each.measured for each in CPU_QUANTITIES] == ["process_peak_bytes"]
    assert [each.measured for each in CUDA_QUANTITIES] == ["peak_bytes", "reserved_bytes"]  # the allocator's


def test_what_is_changed_takes_the_place_of_what_was_there() -> None:
    assert spec(TRANSFORMER, "x", ["a.b=1", "m=2"], ["a.b=3"]).words == ["m=2", "a.b=3"]


def test_words() -> None:
    given = asked(["here", "only=transformer,compiled", "most=3"])
    assert given == (Path("here"), ("transformer", "compiled"), 3)
    assert asked(["print"]).most == 0


@pytest.mark.parametrize("word", ["only=resnets", "only=", "most=-1", "most=x", "device=cpu"])
def test_bad_words_are_one_sentence(word: str) -> None:
    with pytest.raises(BadInput) as caught:
        asked([word])
    assert "\n" not in str(caught.value)
    assert word.partition("=")[0] in str(caught.value)
