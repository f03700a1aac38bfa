"""scripts/benchmarks/bench_knobs.py goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.config.registry import Option
from lowvram.results.row import Row, empty_row, merge
from scripts.benchmarks.bench_knobs import Bench, Book, name_of
from scripts.benchmarks.runs import Runs

EVERY1, EVERY2, PARTS, MORE_PARTS = ("ckpt", "every1"), ("ckpt", "every2"), ("accum", "x2"), ("accum", "x4")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, in this order; a baseline is ""."""
    names: list[str] = []

    def timed(_: Bench, option: Option | None) -> Row:
        names.append(name_of(option))
        return merge(empty_row(), {"status": "ok", "time": {"step_ms_p50": 10.0}})

    def gradient_error(_: Bench, option: Option | None) -> float:
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
    bench.gradients([EVERY1, PARTS, ("optimizer", "sgd")])
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
