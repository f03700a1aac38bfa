"""What the framework itself costs: a sweep's point beyond its own build and steps, --help, tab completion.

scripts/python scripts/benchmarks/bench_overhead.py [points]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lowvram.config.identity import ROOT
from lowvram.results.table import collect

TRAIN = [sys.executable, str(ROOT / "train.py")]
QUICK = [
    "mode=measure",
    "measure.reruns=0",
    "data=synthetic",
    "train.batch_size=4",
    "measure.steps=2",
    "measure.warmup_steps=1",
]


def point_overheads_s(num_points: int) -> list[float]:
    """For each point but the first (which waits for torch's import): seconds between results, less its own seconds."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = ",".join(map(str, range(num_points)))
        words = [*TRAIN, "-m", *QUICK, f"seed={seeds}", "hydra.sweep.dir=sweep"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        rows = collect(Path(folder) / "sweep")
        ended = [(Path(folder) / "sweep" / row["id"] / "result.json").stat().st_mtime for row in rows]
        own = [row["time"]["total_s"] for row in rows]
        return [after - before - mine for before, after, mine in zip(ended, ended[1:], own[1:], strict=False)]


def call_s(words: list[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, **(environment or {})})
    return time.perf_counter() - began


def shown(name: str, seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{name:24} {middle:.3f} s (from {low:.3f} to {high:.3f}, {len(seconds)} times)"


def main() -> None:
    num_points = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    print(shown("a sweep's point, beyond", point_overheads_s(num_points)))
    print(shown("train.py --help", [call_s([*TRAIN, "--help"]) for _ in range(7)]))
    completion = {"COMP_LINE": "train.py precision=", "COMP_POINT": "19"}
    print(shown("tab completion", [call_s([*TRAIN, "-sc", "query=bash"], completion) for _ in range(7)]))
    print(shown("python -c pass", [call_s([sys.executable, "-c", "pass"]) for _ in range(7)]))


if __name__ == "__main__":
    main()
