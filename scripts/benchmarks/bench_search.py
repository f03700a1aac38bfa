"""What mode=search finds against the best of a grid that was measured exhaustively.

    scripts/python scripts/benchmarks/bench_search.py [FOLDER] [model=transformer,resnet] [seconds=5]

Models are those of bench_search_models.py: two of our own (the default), and six of other people.

Every point of the grid (six options of ckpt, five of accum) is measured for some seconds in a fresh process, without a
budget. Then, for each of three budgets, mode=search picks from the same groups. What fits is what runs: points of the
grid, the fastest first, take two updates with `vram` as the cap that a search's probes have, until three of them end
well. The pick and these three are measured under that cap again, in turns, each round in the other order, and the one
with the highest median is the best. The report, a Markdown page on standard output, says what share of the best's
throughput the pick has, what became of the probes, and where the best was lost: planned too large, or too slow.

Where others take the cores, times mean little. `taskset -c 1 scripts/python ...` measures one core; what others took of
it meanwhile is counted, and times are those of the rest.

FOLDER (default: outputs/bench_search) keeps what was measured of the grid and of each budget, which isn't measured
again. Some 45 minutes on a quiet machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

from lowvram.config.identity import device_name, installed_version
from lowvram.planning.time.calibration import num_threads
from lowvram.results.row import Row, Status
from lowvram.results.table import collect
from scripts.benchmarks.bench_search_models import MODELS, OWN, write_models
from scripts.benchmarks.bench_search_report import Plans, Point, Probe, Result, lines, lost
from scripts.benchmarks.runs import Runs

GRID = {
    "ckpt": ["none", "every1", "every2", "every3", "every4", "selective"],
    "accum": ["none", "x2", "x4", "x8", "x16"],
}
COMMON = ["data=synthetic", "data.eval_samples=16", "measure.warmup_steps=2"]
MEASURED = ["mode=measure", "measure.reruns=0", "timeout_s=300"]
WINDOW = ["measure.steps=1000"]  # it ends by its seconds
BUDGETS = (1 / 4, 1 / 2, 3 / 4)  # of the way from the smallest process of the grid to the largest
NUM_RIVALS, NUM_ROUNDS = 3, 4
MIB = 2**20


class Timed(NamedTuple):
    """What was measured of a point."""

    samples_per_s: float | None  # null: it didn't run to its end
    grown_bytes: int | None
    disturbed: float  # share of the cores' time that others took meanwhile


class Moment(NamedTuple):
    """Seconds so far."""

    clock_s: float
    busy_s: float  # that the cores were busy which this process may use
    own_s: float  # that this process and its ended points took of them


def now() -> Moment:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    busy = sum(int(each) for line in lines if line[0] in names for each in (*line[1:4], *line[6:9]))  # all but idle
    servers = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    stats = [Path("/proc", pid, "stat").read_text().rpartition(")")[2].split() for pid in servers]
    own = sum(int(each) for stat in stats for each in stat[11:15])  # utime, stime, and those of its ended children
    return Moment(time.monotonic(), busy * tick_s, own * tick_s + time.process_time())


def others_share(start: Moment, end: Moment, num_cores: int) -> float:
    """Of the cores' time, what others took of it."""
    busy_s, own_s = end.busy_s - start.busy_s, end.own_s - start.own_s
    return max(0.0, busy_s - own_s) / (end.clock_s - start.clock_s) / num_cores


@final
@dataclass(frozen=True)
class Book:
    """A file of JSON lines."""

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line


@final
@dataclass
class Bench:
    """One model's grid and searches."""

    runs: Runs
    folder: Path
    model: str
    seconds: float

    def words(self, *more: str) -> list[str]:
        return [*MODELS[self.model], *COMMON, f"measure.max_seconds={self.seconds}", *more]

    def run(self, words: Sequence[str], *more: str) -> Row:
        return self.runs.run(" ".join(words), self.words(*MEASURED, *words, *more))

    def timed(self, words: Sequence[str], *more: str) -> Timed:
        """For the whole window."""
        start = now()
        row = self.run(words, *more, *WINDOW)
        share = others_share(start, now(), num_threads())
        return Timed(rate(row, share), row["memory"]["process_peak_bytes"], share)

    def grid(self) -> list[Point]:
        """Every point, measured now or before."""
        book = Book(self.folder / f"{self.model}.jsonl")
        known = {tuple(line["words"]): line for line in book.lines()}
        for values in product(*GRID.values()):
            words = [f"{group}={value}" for group, value in zip(GRID, values, strict=True)]
            if tuple(words) not in known:
                known[tuple(words)] = book.add({"words": words, **self.timed(words, "allocator=tight")._asdict()})
        return [Point(**line) for line in known.values() if line["samples_per_s"] is not None]

    def searches(self, grid: list[Point]) -> list[Result]:
        """Of every budget, made now or before."""
        book = Book(self.folder / f"{self.model}_searches.jsonl")
        known = {line["vram"]: line for line in book.lines()}
        for vram in budgets(grid):
            if vram not in known:
                known[vram] = book.add(self.searched(vram, grid)._asdict())
        return [
            Result(**{**known[vram], "probes": [Probe(*each) for each in known[vram]["probes"]]})
            for vram in budgets(grid)
        ]

    def searched(self, vram: str, grid: list[Point]) -> Result:
        """Search, and measure the pick beside the best of the grid."""
        words = self.words("mode=search", f"vram={vram}", f"search.groups=[{','.join(GRID)}]", *WINDOW)
        row = self.runs.run(f"search {vram}", words)
        if row["status"] != Status.OK:
            raise SystemExit(f"{self.model}, {vram}: {row['status']}: {row['reason']}")
        probes = [probe_of(probe) for probe in collect(self.runs.folder / row["id"])]
        tried = [*self.tried(vram, grid)]
        rivals = [point.words for point, is_fitting in tried if is_fitting]
        pick = words_of(row)
        timed = self.in_turns(vram, [pick, *(words for words in rivals if words != pick)])
        rates = {name: [one.samples_per_s or 0.0 for one in rounds] for name, rounds in timed.items()}
        disturbed = median(one.disturbed for rounds in timed.values() for one in rounds)
        found = Result(vram, len(tried), rates, " ".join(pick), probes, disturbed, "")
        return found._replace(lost=lost(found, self.plans(vram, grid)))

    def tried(self, vram: str, grid: list[Point]) -> Iterator[tuple[Point, bool]]:
        """Points of the grid, the fastest first, and whether they run under that cap; until so many have."""
        num_fitting = 0
        for point in sorted(grid, key=lambda one: -one.samples_per_s):
            row = self.run(point.words, f"vram={vram}", "measure.warmup_steps=1", "measure.steps=1")
            num_fitting += row["status"] == Status.OK
            yield point, row["status"] == Status.OK
            if num_fitting == NUM_RIVALS:
                return

    def in_turns(self, vram: str, contenders: list[list[str]]) -> dict[str, list[Timed]]:
        """Under that cap, one after another, each round in the other order; by the name of the point."""
        found: dict[str, list[Timed]] = {" ".join(words): [] for words in contenders}
        for number in range(NUM_ROUNDS):
            for words in contenders[:: -1 if number % 2 else 1]:
                found[" ".join(words)].append(self.timed(words, f"vram={vram}"))
        return found

    def plans(self, vram: str, grid: list[Point]) -> Plans:
        """Of all points, by their names, as that search sees them."""
        words = {point.name: self.words(*point.words, f"vram={vram}", "plan.device=cpu") for point in grid}
        return {name: row["plan"] for name, row in zip(words, self.runs.plan(words), strict=True)}


def probe_of(row: Row) -> Probe:
    return Probe(" ".join(words_of(row)), row["status"], row["memory"]["process_peak_bytes"])


def words_of(row: Row) -> list[str]:
    return [f"{group}={row['choices'][group]}" for group in GRID]


def rate(row: Row, disturbed: float) -> float | None:
    """Samples/s of the median step, in the time that the cores were not others'."""
    if row["status"] != Status.OK:
        return None
    return row["config"]["train"]["batch_size"] * 1e3 / row["time"]["step_ms_p50"] / (1 - disturbed)


def budgets(grid: list[Point]) -> list[str]:
    """From those that few points fit into to those that most do."""
    sizes = [point.grown_bytes for point in grid]
    least, most = min(sizes), max(sizes)
    return [f"{round((least + share * (most - least)) / MIB)}MiB" for share in BUDGETS]


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folder = Path(next((word for word in sys.argv[1:] if "=" not in word), "outputs/bench_search"))
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{device_name()}, torch {installed_version('torch')}, {num_threads()} threads"
    print("# The pick of a search beside the best of a grid\n")
    print(f"`scripts/python scripts/benchmarks/bench_search.py {' '.join(sys.argv[1:])}`: {about}")
    write_models()
    for model in given.get("model", ",".join(OWN)).split(","):
        with Runs(folder / time.strftime("%H-%M-%S") / model) as runs:
            bench = Bench(runs, folder, model, float(given.get("seconds", 5)))
            grid = bench.grid()
            results = bench.searches(grid)
            title = f"{model}: `{' '.join(bench.words())}`"
            print("", *lines(title, grid, results, bench.plans(results[0].vram, grid)), sep="\n")


if __name__ == "__main__":
    main()
