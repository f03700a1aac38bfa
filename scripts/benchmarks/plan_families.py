"""How far plans lie from the ledger for models of strangers: small ones of 36 families of the library transformers.

    scripts/python scripts/benchmarks/plan_families.py [FOLDER] [only=seen,"held out"] [most=N] [print]

Every point (plan_families_points.py) is planned for a CPU, all before the first one runs, and then runs two updates in
a fresh process. The ledger counts the tensors of a real step as a plan counts those without values: what can
differ is what the model computes. FOLDER (default: outputs/plan_families) and the other words are as for
plan_accuracy.py. About 10 minutes on 2 cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from lowvram.config.errors import BadInput
from lowvram.config.identity import device_name
from scripts.benchmarks.book import Book
from scripts.benchmarks.plan_accuracy import BYTES_PER_PARAMETER, asked, by_name, freeze, measure
from scripts.benchmarks.plan_accuracy_points import MODELS
from scripts.benchmarks.plan_accuracy_report import Quantity, Report
from scripts.benchmarks.plan_families_points import GROUPS, KINDS, family_points, write_family
from scripts.benchmarks.runs import Runs

FIXED = ["device=cpu", "data.eval_samples=1"]
LEDGER = [Quantity("ledger", "allocated_bytes", "peak_bytes")]
BASELINES = {f"{BYTES_PER_PARAMETER} bytes per parameter": "sixteen_bytes"}


def main() -> None:
    try:
        given = asked(sys.argv[1:], Path("outputs/plan_families"), GROUPS)
    except BadInput as error:
        raise SystemExit(str(error)) from None
    for kind in KINDS:
        write_family(kind, MODELS / kind)
    specs = [spec for spec in family_points() if spec.family in given.families]
    predictions, measured = (Book(given.folder / f"{name}.jsonl") for name in ("predictions", "measured"))
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        freeze(predictions, specs, runs, FIXED, "cpu", None)
        measure(measured, specs, runs, FIXED, given.most)
    report = Report(specs, by_name(specs, predictions), by_name(specs, measured), LEDGER, BASELINES)
    command = " ".join(["scripts/python scripts/benchmarks/plan_families.py", *sys.argv[1:]])
    print("# Plans of models of strangers beside the ledger\n")
    print(f"`{command}`: torch {torch.__version__}, {device_name()}; MiB.\n")
    print("\n".join(report.lines()))


if __name__ == "__main__":
    main()
