"""mode=search from the command line: candidates are planned, the best are measured, and the winner is a command."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.launch.spec import Point
from lowvram.results.row import empty_row, merge, write
from lowvram.search.client import Candidate, Candidates, Searches, measuring_order
from lowvram.search.result import with_changes
from tests.calls import TINY, Outcome, read_row
from tests.refusals import refusal

Call = Callable[..., Outcome]
LARGE = [*TINY, "train.batch_size=256", "data.sequence_length=64"]
SEARCH = ["mode=search", *LARGE, "device=cpu", "search.groups=[ckpt,accum]", "measure.max_seconds=0.5"]
MIB = 2**20


def commands(outcome: Outcome) -> list[list[str]]:
    """The words of the commands that a search ends with."""
    lines = [line.split("train.py", 1)[1] for line in outcome.out.splitlines() if line.startswith("  ")]
    return [shlex.split(line) for line in lines if "=" in line]


@pytest.mark.slow
def test_the_winner_runs_within_the_budget(call: Call) -> None:
    outcome = call(*SEARCH, "vram=70MiB", "search.probes=2")
    assert outcome.code == 0, outcome.said()
    rows = [read_row(path.parent) for path in sorted(outcome.cwd.glob("outputs/**/result.json"))]
    assert len(rows) == 2
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        assert row["plan"]["allocated_bytes"] == pytest.approx(row["memory"]["peak_bytes"], rel=0.01)
        assert row["plan"]["step_ms_source"] == "calibrated on this device"
    assert "combinations of ckpt, accum" in outcome.out
    assert "too large, the fastest first: the options in use (" in outcome.out
    assert "the fastest: " in outcome.out
    best = max(rows, key=lambda row: row["throughput"]["samples_per_s"])
    typed, from_file = commands(outcome)
    again = call(*typed, "mode=measure", "hydra.run.dir=again")
    assert again.code == 0, again.said()
    row = read_row(Path("again"))
    assert {group: row["choices"][group] for group in ("ckpt", "accum")} == {
        group: best["choices"][group] for group in ("ckpt", "accum")
    }
    assert row["config"]["vram"] == "70MiB"
    assert call(*from_file, "mode=measure", "hydra.run.dir=from_file").code == 0
    assert read_row(Path("from_file"))["config"]["accum"] == row["config"]["accum"]
    assert read_row(Path("from_file"))["config"]["ckpt"] == row["config"]["ckpt"]


@pytest.mark.slow
def test_for_another_device_it_only_plans(call: Call) -> None:
    outcome = call(*SEARCH, "plan.device=rtx3060", "vram=530MiB")
    assert outcome.code == 0, outcome.said()
    rows = [read_row(path.parent) for path in sorted(outcome.cwd.glob("outputs/**/result.json"))]
    assert rows
    assert all(row["plan"]["fits"] and row["memory"]["peak_bytes"] is None for row in rows)
    assert "planned step ms" in outcome.out
    (table,) = outcome.cwd.glob("outputs/**/table.md")
    assert (table.parent / "report.html").exists()
    assert "least vram" in table.read_text()


@pytest.mark.slow
def test_what_nothing_fits_is_one_sentence_and_leaves_nothing(call: Call) -> None:
    outcome = call(*SEARCH, "plan.device=rtx3060", "vram=1MiB")
    assert outcome.code == 3
    assert outcome.err.startswith("vram=1.00 MiB: nothing fits: the smallest plan found fits into vram=")
    assert outcome.err.count("\n") == 1
    assert not list(outcome.cwd.glob("outputs/**/result.json"))


def test_a_model_that_cannot_be_planned_is_measured_instead(call: Call) -> None:
    """The search says so; the point runs, and its row says why there is no plan."""
    model = ["model=external", "model.target=tests.yours.Looking", "model.args={vocab_size: data.vocab_size}"]
    words = [*model, "model.reads=TOKENS", "data=synthetic", "data.vocab_size=16", "data.sequence_length=8"]
    words += ["train.batch_size=4", "device=cpu", "vram=1GiB", "logger=none"]
    searched = call("mode=search", "plan.device=rtx3060", *words)
    assert searched.code == 1
    assert "return self.head(x if x.mean().item() > 0 else -x)" in searched.out
    assert "a search needs plans: mode=measure runs a point without one" in searched.out
    assert "Traceback" not in searched.out
    measured = call("mode=measure", "measure.steps=1", "measure.warmup_steps=1", *words, "hydra.run.dir=measured")
    assert measured.code == 0, measured.said()
    row = read_row(Path("measured"))
    assert row["memory"]["peak_bytes"] > 0
    assert "depends on the values of a tensor" in row["plan"]["reason"]


@pytest.mark.slow
def test_searches_can_be_swept(call: Call) -> None:
    outcome = call("-m", *SEARCH, "plan.device=rtx3060", "vram=1MiB,1GiB")
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"vram1MiB": "incompatible", "vram1GiB": "ok"}
    assert outcome.rows["vram1GiB"]["choices"]["mode"] == "plan"


def test_bad_input_is_one_sentence(call: Call) -> None:
    for word, sentence in {
        "search.probes=0": "search.probes=0: must be between 1 and 12",
        "search.groups=[model]": "search.groups='model': must be a list of some of allocator, ",
        "search.groups=[]": "search.groups=",
        "plan.host=much": "plan.host='much': must be null or a number above 0 with a unit",
        "search.budget=3": "search.budget",
    }.items():
        assert sentence in refusal(*SEARCH, "vram=100MiB", word)
    said = call(*SEARCH, "vram=100MiB", "plan.device=generic").sentence
    assert "plan.device='generic': must be a device whose YAML gives its rates" in said


def test_what_only_the_search_needs_is_no_part_of_the_command() -> None:
    words = [
        "mode=search",
        "model=gpt2",
        "search.probes=2",
        "vram=8GiB",
        "ckpt=none",
        "hydra.run.dir=x",
        "plan.margin=0",
    ]
    found = with_changes(words, {"ckpt": "every1", "precision": "bf16"})
    assert found == ["model=gpt2", "vram=8GiB", "ckpt=every1", "precision=bf16"]


def test_after_a_probe_that_ran_out_of_memory_the_next_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = iter(["oom", "ok", "error", "ok", "ok"])

    def run(self: Searches, probe: Point) -> dict[str, Any]:
        row = merge(empty_row(), {"id": probe.id, "status": next(ended)})
        write(probe.folder, row)
        return row

    monkeypatch.setattr(Searches, "run", run)
    quiet = type("Quiet", (), {"say": lambda self, text: None})()
    searches = Searches(None, quiet, lambda: 0, lambda point: None)  # pyright: ignore[reportArgumentType]
    probes = [Point(str(n), str(n), n, tmp_path / str(n), {"timeout_s": None}, {}, None, {}) for n in range(6)]
    assert [row["status"] for row in searches.measure(probes, 2, math.inf)] == ["oom", "ok", "error", "ok"]
    kept = [row["id"] for row in searches.measure(probes, 2, math.inf)]
    assert kept[0] == "0"  # an earlier call knows it: it isn't run again


@pytest.mark.slow  # trains what the search has written
def test_the_file_is_an_experiment(call: Call) -> None:
    outcome = call(*SEARCH, "plan.device=rtx3060", "vram=530MiB")
    (path,) = outcome.cwd.glob("outputs/**/experiment/winner.yaml")
    assert path.read_text().startswith("# @package _global_\n# Found by mode=search: ")
    names = [next(iter(each)) for each in OmegaConf.load(path).defaults]
    assert names
    assert all(name.startswith("override /") for name in names)


def test_the_last_probe_is_the_thriftiest() -> None:
    times, sizes = [1.0, 1.1, 1.2, 1.3, 2.0], [10, 9, 9, 5, 4]
    ranking: list[Candidate] = [
        {"step_ms": time, "least_vram_bytes": size, "fits": True} for time, size in zip(times, sizes, strict=True)
    ]
    order = [ranking.index(one) for one in measuring_order(ranking, 3)]
    assert order == [0, 1, 3, 2, 4]
    assert measuring_order(ranking, 1) == ranking  # one probe is the fastest
    assert measuring_order(ranking[:3], 3) == ranking[:3]
    assert measuring_order(ranking[3:] + ranking[:3], 2) == ranking[3:] + ranking[:3]  # which is the thriftiest already


def test_one_that_fits_only_without_its_margin_is_the_first_probe_and_no_reason_to_leave_out_the_thriftiest() -> None:
    figures = [(0.3, 11, False), (1.0, 10, True), (1.1, 9, True), (1.2, 5, True)]
    ranking: list[Candidate] = [
        {"step_ms": time, "least_vram_bytes": size, "fits": fits} for time, size, fits in figures
    ]
    assert [ranking.index(one) for one in measuring_order(ranking, 3)] == [0, 1, 3, 2]


@pytest.mark.parametrize(
    ("ends", "status"),
    [(["oom", "oom"], "incompatible"), (["oom", "ok"], "ok"), (["oom", "error"], "oom")],
)
def test_where_nothing_fits_probes_that_run_out_of_memory_end_in_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], status: str
) -> None:
    plan = {"step_ms": 1.0, "least_vram_bytes": MIB, "allocated_bytes": MIB, "fits": False}
    ranking = [{**plan, "changes": {"accum": name}} for name in ("x32", "x16")]
    found = Candidates(ranking, ["an account"], refusal="nothing fits")
    ran = {"time": {"step_ms_p50": 2.0}, "throughput": {"samples_per_s": 8.0}, "memory": {"peak_bytes": MIB}}
    search = {"probes": 3, "max_seconds": None}
    config = {
        "search": search,
        "plan": {"device": "auto"},
        "logger": {"group": None},
        "vram": "1MiB",
        "timeout_s": None,
    }

    def probe_of(point: Point, words: list[str], number: int, candidate: Candidate, is_real: bool) -> Point:
        folder = tmp_path / str(number)
        return Point(folder.name, folder.name, number, folder, config, {}, "sweep", {}, plan=plan)

    def run(self: Searches, probe: Point) -> dict[str, Any]:
        end = {"status": ends[probe.index]}
        row = merge(probe.first_row(), end | ran if end["status"] == "ok" else end)
        write(probe.folder, row)
        return row

    monkeypatch.setattr(Searches, "find", lambda self, point, typed, ends: found)
    monkeypatch.setattr("lowvram.search.client.probe_of", probe_of)
    monkeypatch.setattr(Searches, "run", run)
    said: list[str] = []
    quiet = type("Quiet", (), {"say": lambda self, text: said.append(text), "show": lambda self, text: None})()
    searches = Searches(None, quiet, lambda: 0, lambda point: None)  # pyright: ignore[reportArgumentType]
    row = searches.row(Point("search", "search", 0, tmp_path, config, {}, None, {}), [])
    assert row is not None
    assert row["status"] == status
    assert (row["reason"] == "nothing fits") == (status == "incompatible")
    assert any("it ran under vram=1MiB, though its plan doesn't fit" in line for line in said) == (status == "ok")


@pytest.mark.slow
def test_what_fits_only_without_its_margin_is_measured(call: Call) -> None:
    """With a little less than what a search names as the smallest vram that would do."""
    words = [*SEARCH, "measure.warmup_steps=1", "hydra.run.dir=searched"]
    refused = call(*words, "vram=1MiB")
    assert refused.code == 3, refused.said()
    (enough_mib,) = re.findall(r"the smallest plan found fits into vram=(\d+)MiB", refused.err)
    outcome = call(*words, f"vram={int(enough_mib) - 2}MiB")
    assert outcome.code == 0, outcome.said()
    rows = [read_row(path.parent) for path in outcome.cwd.glob("searched/**/result.json")]
    assert 1 <= len(rows) <= 2
    assert not any(row["plan"]["fits"] for row in rows)
    assert "fits only without its margin, so a probe decides: " in outcome.out
    assert f"it ran under vram={int(enough_mib) - 2}MiB, though its plan doesn't fit with its margin" in outcome.out
