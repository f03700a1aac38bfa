"""Plans beside what other people measured on their cards, and beside what other tools estimated for these runs.

    scripts/python -m pip install --no-deps torchvision==0.28.0   # for the image models
    scripts/python scripts/benchmarks/plan_world.py               # plans what is not planned yet: ten minutes
    scripts/python scripts/benchmarks/plan_world.py again         # plans all of it anew

It reads docs/results/world/xmem.csv, adds to docs/results/world/xmem_planned.jsonl, and writes
docs/plans_against_the_world.md. No GPU and no network are needed. Nothing in the program is fitted to these rows.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import lowvram
from lowvram.config.identity import ROOT
from lowvram.planning.trace.fake import CantPlan
from scripts.benchmarks.book import Book, stamp
from scripts.benchmarks.plan_world_report import Run, WorldReport
from scripts.benchmarks.world_models import task_of

FOLDER, PAGE = ROOT / "docs/results/world", ROOT / "docs/plans_against_the_world.md"
CARDS = {"3060": "rtx3060", "4060": "rtx4060", "a100": "a100"}
# Where their loop calls zero_grad; what a row leaves out is the default of their trainer.
ZERO_GRAD = {"0": "before_forward", "1": "before_backward", "2": "after_step", "null": "before_backward"}
OPTIMIZERS = {"Adafactor": "optimizer=adafactor"}  # transformers' Adafactor has the same state; others are torch's own


def runs(path: Path) -> list[Run]:
    with path.open(newline="") as file:
        return [Run(row) for row in csv.DictReader(file)]


def planned(run: Run) -> dict[str, Any]:
    """What the plan of a run says."""
    task, targets = task_of(run["model"])
    external = f"optimizer=external optimizer.target=torch.optim.{run['optimizer']}"
    knobs, device = OPTIMIZERS.get(run["optimizer"], external), CARDS[run["card"]]
    zero_grad = ZERO_GRAD[run["zero_grad_mode"]]
    try:
        plan = lowvram.plan(task, targets, int(run["batch"]), knobs, device, loop="plain", zero_grad=zero_grad)
    except CantPlan as error:
        return {"reason": str(error)}
    return {name: plan[name] for name in ("allocated_bytes", "reserved_bytes", "least_vram_bytes")}


def main() -> None:
    book, known_runs = Book(FOLDER / "xmem_planned.jsonl"), runs(FOLDER / "xmem.csv")
    if "again" in sys.argv[1:]:
        book.forget(list(book.read()))
    known = book.read()
    for number, run in enumerate(known_runs, 1):
        if run.key not in known:
            book.add({"key": run.key, **planned(run), **stamp()})
            print(f"{number} of {len(known_runs)}: {run.key}", flush=True)
    PAGE.write_text("\n".join(WorldReport(known_runs, book.read()).lines()) + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()
