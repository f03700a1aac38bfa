"""The agenda for a card: what it runs, in what time, and what it keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose

from lowvram.config.identity import ROOT
from lowvram.results.row import to_json
from scripts.benchmarks import agenda, agenda_items, bench_headline
from scripts.benchmarks.agenda import Asked, asked, found, keep, run_all
from scripts.benchmarks.agenda_items import ORDER, Item, Kind, items
from scripts.benchmarks.book import Book
from scripts.benchmarks.runs import Runs
from tests.laboratory import IS_EMULATED

SAYS = "import sys; [print('{\"figure\": %s}' % word, flush=True) for word in sys.argv[1:]]"


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An agenda of three probes of a second or less; its folder."""

    def item(name: str, *words: str, limit_s: int = 30) -> Item:
        return Item(name, f"about {name}", Kind.PROBE, words, limit_s)

    chosen = [item("quick", "1", "2"), item("endless", "3", limit_s=2), item("wrong", "oops")]
    monkeypatch.setattr(agenda, "items", lambda is_trial: chosen)
    monkeypatch.setattr(agenda, "GRACE_S", 1)
    monkeypatch.setattr(agenda, "LEAST_S", 1)
    ends = {"quick": "", "endless": "; import time; time.sleep(60)", "wrong": "; sys.exit(4)"}
    monkeypatch.setattr(
        agenda, "command", lambda item, work: [sys.executable, "-c", SAYS + ends[item.name], *item.words]
    )
    return tmp_path / "results"


@pytest.mark.slow
def test_an_agenda_keeps_what_each_item_found_and_runs_again_only_what_was_cut_off(lines: Path) -> None:
    given = Asked(lines, (), False, False)
    assert run_all(given, 60) == 1  # one was cut off, one failed
    book = Book(lines / "agenda.jsonl")
    kept = book.read()
    assert {name: (line["code"], line["is_cut"], line["found"]) for name, line in kept.items()} == {
        "quick": (0, False, [{"figure": 1}, {"figure": 2}]),
        "endless": (None, True, [{"figure": 3}]),
        "wrong": (4, False, []),
    }
    assert "about quick" in (lines / "agenda.log").read_text()
    run_all(given, 60)
    again = [json.loads(line)["key"] for line in (lines / "agenda.jsonl").read_text().splitlines()]
    assert again == ["quick", "endless", "wrong", "endless"]


def test_an_agenda_ends_within_its_budget(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(Asked(lines, (), False, False), 1) == 1
    assert capsys.readouterr().out == "".join(f"{name}: no time is left\n" for name in ("quick", "endless", "wrong"))
    assert not (lines / "agenda.jsonl").exists()


@pytest.mark.parametrize("is_trial", [False, True])
def test_every_item_can_be_started(is_trial: bool, tmp_path: Path) -> None:
    """Points compose, tests are there, probes have a function of their name."""
    probes = (ROOT / "scripts" / "benchmarks" / "card_probes.py").read_text()
    assert sorted(ORDER) == sorted(item.name for item in items(is_trial))
    with Runs(tmp_path):
        for item in items(is_trial):
            match item.kind:
                case Kind.POINTS:
                    words = [word for word in item.words if "," not in word and not word.startswith("hydra.")]
                    for point in [[], *points_of(item)]:
                        compose("config", [*words, *point], return_hydra_config=True)
                case Kind.TESTS:
                    assert all((ROOT / path).exists() for path in item.words)
                case Kind.PROBE:
                    assert f"def {item.words[0]}(is_trial: bool)" in probes


def points_of(item: Item) -> list[list[str]]:
    """The words of an item's points, if it lists them."""
    listed = {agenda_items.listed(named): named for named in (agenda_items.SWITCHES, agenda_items.OFFLOADS)}
    return [words.split() for word in item.words if word in listed for words in listed[word].values()]


def test_results_go_to_the_folder_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_headline, "ROOT", tmp_path)
    monkeypatch.setattr(bench_headline, "EMULATED", False)
    row = json.loads((ROOT / "docs" / "results" / "h200" / "points.jsonl").read_text().splitlines()[0])
    about = {"device": "NVIDIA H200", "is_cut": False, "seconds": 1.0, "tail": "a secret", "code": 0}
    for key, kind, lines in (
        ("nine", "points", [row, json.loads(to_json({**row, "status": "oom", "reason": "too large"}))]),
        ("context", "probe", [{"after": "a product", "mib": 12.5}]),
        ("tests", "tests", [{"test": "tests/a.py::test_b - why", "outcome": "FAILED"}]),
    ):
        Book(tmp_path / "agenda.jsonl").add(
            {"key": key, "about": f"about {key}", "kind": kind, "found": lines, **about}
        )
    keep(tmp_path)
    page = (tmp_path / "docs" / "results" / "h200" / "agenda.md").read_text()
    peak = f"{row['memory']['peak_bytes'] / 2**30:.3f}"
    for part in (
        "# The agenda on NVIDIA H200",
        "## about nine",
        peak,
        "oom: too large",
        "| a product | 12.5 |",
        "1 failed",
    ):
        assert part in page
    assert "secret" not in (tmp_path / "docs" / "results" / "h200" / "agenda.jsonl").read_text()


def test_outcomes_are_read_with_and_without_several_workers(tmp_path: Path) -> None:
    printed = (
        "[gw3] [ 88%] SKIPPED tests/a.py::test_b[1-x] \n[gw0] [ 9%] PASSED tests/a.py::test_c \n"
        "[gw1] [ 99%] FAILED tests/a.py::test_d[y] \n"
    )
    item = Item("tests", "", Kind.TESTS, (), 1)
    assert [(line["test"], line["outcome"]) for line in found(item, tmp_path, printed)] == [
        ("tests/a.py::test_b[1-x]", "SKIPPED"),
        ("tests/a.py::test_c", "PASSED"),
        ("tests/a.py::test_d[y]", "FAILED"),
    ]


@pytest.mark.parametrize("word", ["only=nothing", "budget=3", "--help"])
def test_an_unknown_word_is_refused(word: str) -> None:
    with pytest.raises(SystemExit, match=word.split("=")[-1]):
        asked([word])


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")
def test_the_agenda_runs_on_an_emulated_card(tmp_path: Path) -> None:
    """Whole, but for its last item, all tests, which run anyway."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check"), "agenda", str(tmp_path / "agenda"), "trial"],
        env={**os.environ, "LOWVRAM_PYTHON": sys.executable, "BUDGET_MIN": "40"},
        capture_output=True,
        text=True,
    )
    lines = Book(tmp_path / "agenda" / "agenda.jsonl").read()
    failed = {name: line["tail"][-300:] for name, line in lines.items() if line["code"] != 0}
    assert not failed, done.stdout + done.stderr[-2000:]
    assert (done.returncode, list(lines)) == (0, list(ORDER))
