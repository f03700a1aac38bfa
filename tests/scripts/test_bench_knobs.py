"""scripts/benchmarks/bench_knobs.py goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowvram.results.row import Row, empty_row, merge
from scripts.benchmarks import bench_knobs_report
from scripts.benchmarks.bench_knobs import FURTHER, Bench, Book, Choice, choices_of, is_one_of, name_of, words_of
from scripts.benchmarks.runs import Runs

EVERY1, EVERY2, PARTS, MORE_PARTS = (
    Choice(*option) for option in (("ckpt", "every1"), ("ckpt", "every2"), ("accum", "x2"), ("accum", "x4"))
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, in this order; a baseline is ""."""
    names: list[str] = []

    def timed(_: Bench, option: Choice | None) -> Row:
        names.append(name_of(option))
        return merge(empty_row(), {"status": "ok", "time": {"step_ms_p50": 10.0}})

    def gradient_error(_: Bench, option: Choice | None) -> float:
        names.append(f"gradients of {name_of(option)}")
        return 0.0

    monkeypatch.setattr(Bench, "timed", timed)
    monkeypatch.setattr(Bench, "gradient_error", gradient_error)
    return names


def test_each_two_options_have_a_baseline_before_and_after(tmp_path: Path, asked: list[str]) -> None:
    Bench(Runs(tmp_path), Book(tmp_path / "kept.jsonl"), ["model=tiny"]).round([EVERY1, EVERY2, PARTS], 1)
    assert asked == ["", "ckpt=every1", "ckpt=every2", "", "accum=x2", ""]


def test_what_is_kept_is_not_measured_again(tmp_path: Path, asked: list[str]) -> None:
    bench = Bench(Runs(tmp_path), Book(tmp_path / "kept.jsonl"), ["model=tiny"])
    bench.round([EVERY1, PARTS], 1)
    bench.gradients([EVERY1])
    asked.clear()
    bench.round([EVERY1, PARTS, MORE_PARTS], 1)
    bench.gradients([EVERY1, PARTS, Choice("optimizer", "sgd")])
    assert asked == ["", "accum=x4", "", "gradients of accum=x2"]
    asked.clear()
    bench.round([EVERY1], 2)
    assert asked == ["", "ckpt=every1", ""]


def test_models_are_kept_apart(tmp_path: Path, asked: list[str]) -> None:
    book = Book(tmp_path / "kept.jsonl")
    for model in ("model=tiny", "model=large"):
        Bench(Runs(tmp_path), book, [model]).round([EVERY1], 1)
    assert asked == ["", "ckpt=every1", ""] * 2
    assert [line["option"] for line in book.lines("model=large")] == ["ckpt=every1"]


def test_an_option_that_the_model_cannot_have_says_nothing_of_the_machine() -> None:
    """Its point didn't start, so nobody has counted its threads."""
    found: dict[str, Any] = {"status": "ok", "step_ms": 10.0, "peak_bytes": 1, "process_peak_bytes": 1}
    found |= {"by_kind": {"other": 0}, "by_kind_max": {"activations": 1}}
    refused = {"status": "incompatible", "reason": "there are none"}
    line = {"model": "tiny", "round": 1, "plain": [found, found]}
    where = {"device_name": "a CPU", "torch": "2"}
    every1 = {"option": "ckpt=every1", "words": "ckpt=every1", "found": found, "machine": {**where, "threads": 1}}
    tiled = {"option": "tile=mlp", "words": "tile=mlp", "found": refused, "machine": {**where, "threads": None}}
    *_, machine = bench_knobs_report.table([line | every1, line | tiled])
    assert machine == "(a CPU, torch 2, 1 thread; 1 round.)"


def test_an_option_with_other_values_has_rows_of_its_own_below_its_own(tmp_path: Path, asked: list[str]) -> None:
    choices = choices_of(("sharding", "fsdp"))
    copies = next(choice for choice in choices if "sharding.replicate=2" in choice.fields)
    assert len(choices) == 1 + len(FURTHER["sharding", "fsdp"])
    assert words_of(choices[0]) == ["sharding=fsdp", "sharding.ranks=2"]
    assert words_of(copies) == ["sharding=fsdp", "sharding.ranks=4", "sharding.replicate=2"]
    book = Book(tmp_path / "kept.jsonl")
    bench = Bench(Runs(tmp_path), book, ["model=tiny"])
    bench.round([Choice("sharding", "zero1"), *choices[:1]], 1)
    asked.clear()
    bench.round([*choices_of(("sharding", "ddp")), *choices], 1)
    assert asked == ["", "sharding=ddp", name_of(choices[1]), "", name_of(copies), name_of(choices[3]), ""]
    rows = [line.split(" | ")[0] for line in bench_knobs_report.table(complete(book.lines("model=tiny")))]
    expected = [["sharding=ddp", "sharding.ranks=2"], *map(words_of, choices), ["sharding=zero1", "sharding.ranks=2"]]
    assert [row for row in rows if "sharding" in row] == [f"| `{' '.join(words)}`" for words in expected]


def complete(lines: list[Any]) -> list[Any]:
    """Lines with the figures that points would have had."""
    figures = {"peak_bytes": 1, "process_peak_bytes": 1, "by_kind": {"other": 0}}
    figures |= {"by_kind_max": {"optimizer": 1, "parameters": 1, "activations": 1}}
    return [
        line | {"found": line["found"] | figures, "plain": [plain | figures for plain in line["plain"]]}
        for line in lines
    ]


@pytest.mark.parametrize(
    ("names", "is_there"), [(["sharding"], True), (["sharding=fsdp"], True), (["sharding=ddp"], False), ([], False)]
)
def test_rows_are_chosen_by_group_or_by_option(names: list[str], is_there: bool) -> None:
    assert is_one_of(names, ("sharding", "fsdp")) == is_there
    assert not is_one_of(names, ("sharding", "none"))


def test_beside_other_work_no_times_are_kept(tmp_path: Path, asked: list[str]) -> None:
    """A later round brings them."""
    book, words = Book(tmp_path / "kept.jsonl"), ["model=tiny"]
    Bench(Runs(tmp_path), book, words, has_times=False).round([EVERY1], 1)
    assert [time_of(line) for line in rows_of(book)] == ["–"]
    Bench(Runs(tmp_path), book, words).round([EVERY1], 2)
    assert [time_of(line) for line in rows_of(book)] == ["1.00"]


def rows_of(book: Book) -> list[str]:
    return [line for line in bench_knobs_report.table(complete(book.lines("model=tiny"))) if "`ckpt" in line]


def time_of(line: str) -> str:
    return line.split(" | ")[-2]
