"""scripts/benchmarks/bench_peers.py: who trains each case, with which words, and the page about their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.benchmarks import bench_peers
from scripts.benchmarks.bench_peers import cases_of, contestants_of, lines_of_ours, memory_lines, with_words
from scripts.benchmarks.contestants import SAVINGS, Case
from tests.conftest import Outcome


def case_with(saving: str) -> Case:
    return next(case for case in cases_of(["full"]) if saving in case.savings)


def test_a_word_for_ours_replaces_what_its_case_says() -> None:
    case = case_with("8bit")
    words = with_words(case, ["accum=x4", "stepping.clip=null"]).overrides(bench_peers.FOLDER)
    assert words.index("accum=x4") > words.index("accum=x32")
    assert words.index("stepping.clip=null") > words.index("stepping.clip=1.0")
    assert case.clip == 1.0  # as the others train it


def test_each_case_of_full_size_trains_its_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "EMULATED", False)
    plain, *others = cases_of(["full"])
    assert not plain.savings
    assert not lines_of_ours(plain, ["full"])
    for case in others:
        assert {SAVINGS[name] for name in case.savings if name in SAVINGS} <= set(case.overrides(bench_peers.FOLDER))
        assert all(name.startswith("ours, ") for name in lines_of_ours(case, ["full"]))


def test_nothing_plain_is_trained_on_an_emulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "EMULATED", True)
    assert all(case.savings for case in cases_of(["full"]))


def test_adafactor_gets_no_word_of_adam() -> None:
    assert not any("beta2" in word for word in case_with("adafactor").overrides(bench_peers.FOLDER))
    assert any("beta2" in word for word in case_with("4bit").overrides(bench_peers.FOLDER))


def test_words_of_the_command_line_are_a_line_of_ours_alone() -> None:
    case = case_with("8bit")
    names = list(contestants_of(case, ["full", "rounds=1", "logits=tiled"]))
    assert names == ["ours", "ours, with logits=tiled", "by_hand", "trainer", "lightning"]


def test_a_line_shows_its_share_of_the_trainers_memory() -> None:
    case, names = case_with("8bit"), ["ours", "ours, with logits=tiled", "by_hand", "trainer", "lightning"]
    lines: list[dict[str, Any]] = [
        {"case": case.name, "round": 0, "contestant": name, "peak_bytes": peak, "reserved_bytes": 2 * peak}
        for name, peak in zip(names, [3 * 2**20, 2**20, 5 * 2**20, 4 * 2**20, 6 * 2**20], strict=True)
    ]
    page = list(memory_lines(case, lines, ["full", "logits=tiled"]))
    assert "| ours | 3 | 0.750 | 6 | 0.750 |" in page
    assert "| ours, with logits=tiled | 1 | 0.250 | 2 | 0.250 |" in page
    assert "| Hugging Face Trainer | 4 | 1.000 | 8 | 1.000 |" in page


@pytest.mark.parametrize("saving", ["8bit", "4bit", "adafactor"])
def test_the_words_of_each_line_of_ours_compose(saving: str, call: Callable[..., Outcome]) -> None:
    case = case_with(saving)
    for words in lines_of_ours(case, ["full"]).values():
        listed = [word for word in with_words(case, words).overrides(bench_peers.FOLDER) if "device=" not in word]
        assert call("--cfg", "job", *listed).code == 0
