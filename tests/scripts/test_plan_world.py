"""docs/plans_against_the_world.md is what its script makes of the committed rows."""

from __future__ import annotations

import csv

from lowvram.config.identity import ROOT
from scripts.benchmarks.book import Book
from scripts.benchmarks.plan_world_report import Plan, Run, WorldReport

FOLDER, PAGE = ROOT / "docs/results/world", ROOT / "docs/plans_against_the_world.md"


def run(nvml: int, xmem: str = "", out: str = "0", model: str = "a") -> Run:
    names = ("frame", "optimizer", "batch", "zero_grad_mode")
    row = {**dict.fromkeys(names, "1"), "model": model, "card": "3060", "card_bytes": "1000", "nvml_bytes": str(nvml)}
    return Run({**row, "real_oom": out, "xmem_bytes": xmem, "dnnmem_bytes": "-1"})


def test_the_page_is_of_the_committed_rows() -> None:
    with (FOLDER / "xmem.csv").open(newline="") as file:
        runs = [Run(row) for row in csv.DictReader(file)]
    plans = Book(FOLDER / "xmem_planned.jsonl").read()
    assert len(runs) == len({each.key for each in runs}) == len(plans)
    assert "\n".join(WorldReport(runs, plans).lines()) + "\n" == PAGE.read_text()


def test_errors_are_of_what_ran_and_verdicts_of_both() -> None:
    runs = [run(100, "90", model="a"), run(200, "220", model="b"), run(900, "1100", "1", "c"), run(900, "9", "1", "d")]
    sizes = {"a": (110, 120), "b": (190, 1200), "c": (2000, 1500), "d": (2000, 900)}
    names = ("reserved_bytes", "least_vram_bytes")
    plans: dict[str, Plan] = {each.key: dict(zip(names, sizes[each["model"]], strict=True)) for each in runs}
    report = WorldReport(runs, plans)
    assert report.errors("ours", report.planned) == "| ours | 2 | 7.5% | 10.0% | 10.0% | +2.5% | 50% |"
    assert report.verdicts() == {"num_out": 2, "ours": 1, "theirs": 1, "num_ran": 2, "ours_wrong": 1}
    assert [line.split(" | ")[0] for line in report.table()[2:]] == ["| a", "| b"]
