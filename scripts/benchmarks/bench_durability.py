"""What it costs that results are on the disk before the program goes on: each thing written with fsync and without.

    scripts/python scripts/benchmarks/bench_durability.py [pairs] [in=FOLDER] [to=PAGE.md]

A pair is one writing with and one without, in a row and in turns of who comes first, in FOLDER (outputs/durability),
which names the disk. What happens between two snapshots is written once for each: the lines of metrics.jsonl and the
snapshot itself; the row comes once for each point. Times are medians over pairs, with 5 to 95 % of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from lowvram.config.identity import ROOT
from lowvram.loops.metrics_log import Metrics
from lowvram.loops.snapshot import Snapshots
from lowvram.results.row import empty_row, write

MIB = 2**20
LINES = 100  # of metrics.jsonl between two snapshots
Write = Callable[[], None]


def snapshot_of(num_bytes: int, folder: Path) -> Write:
    """Snapshots of this size, one after another, of which one is kept."""
    snapshots, state, step = Snapshots(folder / f"{num_bytes}", keep=1), torch.randn(num_bytes // 4), 0

    def save() -> None:
        nonlocal step
        step += 1
        snapshots.save(step, {"step": step, "weights": state})

    return save


def lines_in(folder: Path) -> Write:
    """LINES lines, on the disk."""
    metrics, step = Metrics(folder), 0
    metrics.begin(0, [])

    def tell() -> None:
        nonlocal step
        for _ in range(LINES):
            step += 1
            metrics.write(step, {"loss/train": 1 / step, "grad_norm": 0.5, "lr": 3e-4, "time/step_ms": 12.5})
        metrics.sync()

    return tell


def milliseconds(act: Write) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def unflushed_milliseconds(act: Write) -> float:
    with patch.object(os, "fsync", lambda fd: None):  # nothing waits for the disk
        return milliseconds(act)


def pairs(act: Write, num_pairs: int) -> list[tuple[float, float]]:
    """Milliseconds with and without, of each pair; the first, which makes files and caches, is none."""
    found = []
    for index in range(num_pairs + 1):
        os.sync()  # what was left to the disk by those before is no part of it
        if index % 2:
            found.append((milliseconds(act), unflushed_milliseconds(act)))
        else:
            without = unflushed_milliseconds(act)
            found.append((milliseconds(act), without))
    return found[1:]


def spread(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=20)
    return f"{statistics.median(values):,.1f} ({low:,.1f} to {high:,.1f})"


def report(found: dict[str, list[tuple[float, float]]], num_pairs: int) -> str:
    lines = [
        "# What it costs that results are on the disk",
        "",
        f"`scripts/benchmarks/bench_durability.py {num_pairs}`, torch {torch.__version__}, {os.cpu_count()} cores,",
        f"which other programs used too. {num_pairs} pairs: medians in ms, and 5 to 95 % of them.",
        "",
        "| written | with fsync | without | difference within a pair |",
        "|---|---:|---:|---:|",
    ]
    for name, both in found.items():
        with_ms, without_ms = (list(column) for column in zip(*both, strict=True))
        differences = [one - other for one, other in both]
        lines.append(f"| {name} | {spread(with_ms)} | {spread(without_ms)} | {spread(differences)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    words = {key: value for key, equals, value in (word.partition("=") for word in sys.argv[1:]) if equals}
    num_pairs = next((int(word) for word in sys.argv[1:] if word.isdigit()), 30)
    place = Path(words.get("in", ROOT / "outputs" / "durability"))
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        acts = {
            f"{LINES} lines of metrics.jsonl": lines_in(folder),
            "the row of a point": lambda: write(folder, empty_row()),
            **{f"a snapshot of {size} MiB": snapshot_of(size * MIB, folder) for size in (1, 16, 128)},
        }
        found = {name: pairs(act, num_pairs) for name, act in acts.items()}
    text = report(found, num_pairs)
    print(text)
    if "to" in words:
        Path(words["to"]).write_text(text)


if __name__ == "__main__":
    main()
