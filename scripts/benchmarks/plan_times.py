"""How well predicted times rank configurations here: each is planned with measured rates, and then measured.

    scripts/python scripts/benchmarks/plan_times.py [model=transformer,resnet] [precision=fp32,bf16] [ckpt=none,every1]
                                         [accum=none,x4,x16] [words for every point, such as vram=2GiB or device=cpu]

A table of predicted and measured milliseconds for each model, the correlation of their ranks, and what is lost by
taking the best of the three that are predicted to be the fastest. Every point runs in a fresh process for some seconds.
On a busy machine the measured times tell more about the others than about the points.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from lowvram.config.settings import settings
from lowvram.core.device import choose_device
from lowvram.loops.setup import acting_allocator
from scripts.benchmarks.runs import Runs

SWEPT = {"model": "transformer,resnet", "precision": "fp32,bf16", "ckpt": "none,every1", "accum": "none,x4,x16"}
MEASURED = [
    "mode=measure",
    "measure.reruns=0",
    "measure.warmup_steps=2",
    "measure.steps=20",
    "measure.max_seconds=3",
    "timeout_s=300",
]
NUM_PROBES = 3
CALIBRATE = """
import sys
import torch
from lowvram.knobs.allocator import Tight
from lowvram.planning.time.calibration import Calibrations
from lowvram.planning.time.microbench import calibrate
if sys.argv[2] == "tight":
    Tight().apply(None)
Calibrations().get(torch.device(sys.argv[1]), sys.argv[2], calibrate)
"""


class Timed(NamedTuple):
    """A point."""

    name: str
    predicted_ms: float
    measured_ms: float  # of its fastest steps: the 5th percentile


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    swept = {group: given.pop(group, values).split(",") for group, values in SWEPT.items()}
    fixed = [f"{key}={value}" for key, value in given.items()]
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "times") as runs:
        know_rates(runs, fixed)
        for model in swept.pop("model"):
            report(model, timed(runs, [*fixed, f"model={model}"], swept))


def know_rates(runs: Runs, fixed: list[str]) -> None:
    """Measure the device of the points, if nobody has, as they run: in a process whose threads sleep when they wait."""
    whole = settings(runs.settings_of(fixed))
    device = choose_device(whole.root.device)
    allocator, _ = acting_allocator(whole, {"allocator": "default"}, device)
    subprocess.run(
        [sys.executable, "-c", CALIBRATE, str(device), allocator],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        check=True,
    )


def timed(runs: Runs, fixed: list[str], swept: dict[str, list[str]]) -> list[Timed]:
    """All predictions come before the first measurement."""
    combined = [[f"{k}={v}" for k, v in zip(swept, each, strict=True)] for each in itertools.product(*swept.values())]
    points = {" ".join(words): [*fixed, *words] for words in combined}
    planned = runs.plan({name: [*words, "plan.device=auto"] for name, words in points.items()})
    predicted = [row["plan"] and row["plan"]["step_ms"] for row in planned]
    found: list[Timed] = []
    for (name, words), step_ms in zip(points.items(), predicted, strict=True):
        row = runs.run(name, [*MEASURED, *words])
        measured_ms = row["time"]["step_ms_p05"] if row["status"] == "ok" else None
        print(f"{name}: predicted {step_ms}, measured {measured_ms} ({row['status']})", file=sys.stderr)
        if step_ms is not None and measured_ms is not None:
            found.append(Timed(name, step_ms, measured_ms))
    return found


def report(model: str, points: list[Timed]) -> None:
    print(f"\n| {model} | predicted, ms | measured, ms | ratio |\n|---|---:|---:|---:|")
    for point in sorted(points, key=lambda point: point.predicted_ms):
        ratio = point.predicted_ms / point.measured_ms
        print(f"| {point.name} | {point.predicted_ms:.0f} | {point.measured_ms:.0f} | {ratio:.2f} |")
    best_ms = min(point.measured_ms for point in points)
    probed = sorted(points, key=lambda point: point.predicted_ms)[:NUM_PROBES]
    share = best_ms / min(point.measured_ms for point in probed)
    ranks = torch.tensor([[p.predicted_ms, p.measured_ms] for p in points]).argsort(0).argsort(0).double()
    correlation = float(torch.corrcoef(ranks.T)[0, 1])
    print(f"\nRank correlation {correlation:.2f}; the best of {NUM_PROBES} reaches {share:.1%} of the best throughput.")


if __name__ == "__main__":
    main(sys.argv[1:])
