"""What mode=search finds against the best of a grid that was measured exhaustively.

    scripts/python scripts/bench_search.py [FOLDER] [model=transformer,resnet] [seconds=5]

Every point of the grid (six options of ckpt, five of accum) is measured for some seconds in a fresh process. Then, for
each of three budgets, mode=search picks from the same groups, and its pick and the fastest of the grid whose process
has grown by no more than the budget are measured again, one after the other, three times. Prints what share of the
best's throughput the pick has, how many probes it took, and the largest of them. FOLDER (default:
outputs/bench_search) keeps the grid's rows: what is there isn't measured again. About 20 minutes on 2 quiet cores.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, final

from lowvram.identity import device_name, installed_version
from lowvram.results.row import Row, Status, size_text
from lowvram.results.table import collect
from lowvram.runs import Runs

GRID = {
    "ckpt": ["none", "every1", "every2", "every3", "every4", "selective"],
    "accum": ["none", "x2", "x4", "x8", "x16"],
}
MODELS = {
    "transformer": ["model=transformer", "train.batch_size=16"],
    "resnet": ["model=resnet", "model.norm=group", "train.batch_size=16"],
}
MEASURED = ["mode=measure", "allocator=tight", "measure.steps=1000", "timeout_s=300"]
NUM_BUDGETS, NUM_ROUNDS = 3, 3


class Point(NamedTuple):
    """Of the grid, as it was measured."""

    words: list[str]
    samples_per_s: float
    grown_bytes: int


class Result(NamedTuple):
    """Of one budget."""

    budget_bytes: int
    pick: str
    best: str
    share: float  # of the best's throughput, measured side by side
    spread: tuple[float, float]
    num_probes: int
    largest_bytes: int  # growth of a probe's process


@final
@dataclass
class Bench:
    """One model's grid and searches."""

    runs: Runs
    folder: Path
    model: str
    seconds: float

    def words(self, *more: str) -> list[str]:
        return [*MODELS[self.model], f"measure.max_seconds={self.seconds}", *more]

    def measured(self, name: str, words: list[str]) -> Row:
        return self.runs.run(name, self.words(*MEASURED, *words))

    def grid(self) -> list[Point]:
        """Every point, measured now or before."""
        book = self.folder / f"{self.model}.jsonl"
        known = {
            tuple(line["words"]): line
            for line in map(json.loads, book.read_text().splitlines() if book.exists() else ())
        }
        for values in product(*GRID.values()):
            words = [f"{group}={value}" for group, value in zip(GRID, values, strict=True)]
            if tuple(words) not in known:
                row = self.measured(" ".join(words), words)
                line = {"words": words, **figures(row)}
                with book.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                known[tuple(words)] = line
        return [Point(**line) for line in known.values() if line["samples_per_s"] is not None]

    def searched(self, budget_bytes: int, grid: list[Point]) -> Result:
        """Search, and measure the pick beside the best of the grid."""
        words = self.words("mode=search", f"vram={budget_bytes // 2**20}MiB", f"search.groups=[{','.join(GRID)}]")
        row = self.runs.run(f"search {size_text(budget_bytes)}", [*words, "measure.steps=1000"])
        probes = collect(self.runs.folder / row["id"])
        if row["status"] != Status.OK:
            raise SystemExit(f"{self.model}, {size_text(budget_bytes)}: {row['status']}: {row['reason']}")
        pick = [f"{group}={row['choices'][group]}" for group in GRID]
        best = max((one for one in grid if one.grown_bytes <= budget_bytes), key=lambda one: one.samples_per_s)
        shares = [self.throughput(pick) / self.throughput(best.words) for _ in range(NUM_ROUNDS)]
        grown = [probe["memory"]["process_peak_bytes"] or 0 for probe in probes]
        spread = (min(shares), max(shares))
        return Result(
            budget_bytes, " ".join(pick), " ".join(best.words), median(shares), spread, len(probes), max(grown)
        )

    def throughput(self, words: list[str]) -> float:
        return self.measured(" ".join(words), words)["throughput"]["samples_per_s"]


def figures(row: Row) -> dict[str, Any]:
    is_ok = row["status"] == Status.OK
    grown_bytes = row["memory"]["process_peak_bytes"]
    return {"samples_per_s": row["throughput"]["samples_per_s"] if is_ok else None, "grown_bytes": grown_bytes}


def budgets(grid: list[Point]) -> list[int]:
    """From those that few points fit into to those that most do."""
    return [round(size) for size in quantiles([point.grown_bytes for point in grid], n=NUM_BUDGETS + 1)]


def report(model: str, grid: list[Point], results: list[Result]) -> None:
    print(f"\n## {model}: {len(grid)} points\n")
    print("| budget | points that fit | pick | best | pick / best | probes | largest probe |")
    print("|---:|---:|---|---|---:|---:|---:|")
    for one in results:
        num_fitting = sum(point.grown_bytes <= one.budget_bytes for point in grid)
        share = f"{one.share:.1%} ({one.spread[0]:.1%} to {one.spread[1]:.1%})"
        sizes = f"{size_text(one.budget_bytes)} | {num_fitting}"
        print(f"| {sizes} | {one.pick} | {one.best} | {share} | {one.num_probes} | {size_text(one.largest_bytes)} |")


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folder = Path(next((word for word in sys.argv[1:] if "=" not in word), "outputs/bench_search"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"# The pick of a search beside the best of a grid\n\n{device_name()}, torch {installed_version('torch')}")
    for model in given.get("model", ",".join(MODELS)).split(","):
        with Runs(folder / time.strftime("%H-%M-%S") / model) as runs:
            bench = Bench(runs, folder, model, float(given.get("seconds", 5)))
            grid = bench.grid()
            report(model, grid, [bench.searched(budget_bytes, grid) for budget_bytes in budgets(grid)])


if __name__ == "__main__":
    main()
