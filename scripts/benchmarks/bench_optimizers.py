"""Optimizers of few states beside AdamW: their losses after the same samples, each at its best learning rate.

    OMP_NUM_THREADS=1 scripts/python scripts/benchmarks/bench_optimizers.py transformer|resnet [to=FILE] [OPTION,...]

The default model of that name, 300 updates of 8 samples, warm-up and cosine. With seed 0 each optimizer tries learning
rates in steps of about 3 from 0.001, until the best one lies between two others; two further seeds follow with the two
best rates, and the better one by the mean of three seeds counts.
FILE (default: docs/results/cpu/bench_optimizers.jsonl) keeps each run in a line; what is known isn't run again. The
table is Markdown on standard output. Some half an hour.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from lowvram.config.identity import device_name
from scripts.benchmarks.runs import Runs

OPTIONS = ("adamw", "apollo", "apollo_mini", "galore", "sinkgd", "adam_mini")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST_TRIED = (2, 3, 4)  # places in RATES
SEEDS = (0, 1, 2)
COMMON = ["device=cpu", "train.steps=300", "train.batch_size=8", "train.log_every=50", "schedule=warmup_cosine"]
DEFAULT_FILE = Path("docs/results/cpu/bench_optimizers.jsonl")


@dataclass(frozen=True)
class Bench:
    """The runs of one model, and the file that keeps them."""

    model: str
    file: Path
    runs: Runs

    def known(self) -> list[dict[str, Any]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [line for line in map(json.loads, lines) if line["model"] == self.model]

    def line(self, option: str, lr: float, seed: int) -> dict[str, Any]:
        """What one run found; it runs unless the file knows it."""
        key = {"model": self.model, "optimizer": option, "lr": lr, "seed": seed}
        for line in self.known():
            if key.items() <= line.items():
                return line
        words = [*COMMON, f"model={self.model}", f"optimizer={option}", f"optimizer.lr={lr}", f"seed={seed}"]
        row = self.runs.run("-".join(map(str, key.values())), words)
        figures = {
            "status": row["status"],
            "eval_loss": row["loss"]["eval"],
            "last_loss": row["loss"]["last"],
            "state_bytes": row["memory"]["by_kind_max"]["optimizer"],
            "step_ms": row["time"]["step_ms_p50"],
        }
        line = key | figures | {"parameters": row["model"]["trainable"], "words": COMMON, "device": device_name()}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def loss(self, option: str, place: int) -> float:
        """With seed 0; infinite if the run failed, as one does whose loss isn't finite."""
        found = self.line(option, RATES[place], SEEDS[0])["eval_loss"]
        return float("inf") if found is None else found

    def best_rates(self, option: str) -> list[float]:
        """The two best with seed 0, the best one first. It lies between two others, unless it ends `RATES`."""
        tried = {place: self.loss(option, place) for place in FIRST_TRIED}
        while (best := min(tried, key=lambda place: tried[place])) in (min(tried), max(tried)):
            following = best - 1 if best == min(tried) else best + 1
            if not 0 <= following < len(RATES):
                break
            tried[following] = self.loss(option, following)
        return [RATES[place] for place in sorted(tried, key=lambda place: tried[place])[:2]]

    def complete(self, option: str) -> None:
        for rate in self.best_rates(option):
            for seed in SEEDS[1:]:
                self.line(option, rate, seed)


def of_rates(lines: list[dict[str, Any]]) -> dict[float, list[float]]:
    """The losses of one optimizer at each rate that it ran with all seeds."""
    found = {
        rate: {line["seed"]: line["eval_loss"] for line in lines if line["lr"] == rate}
        for rate in sorted({line["lr"] for line in lines})
    }
    return {rate: list(losses.values()) for rate, losses in found.items() if set(losses) == set(SEEDS)}


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The optimizers, each at the rate with the least mean of all seeds' losses."""
    yield "| optimizer | rates tried | best | eval loss, 3 seeds | mean | to AdamW | state, bytes a parameter |"
    yield "|---|---|---:|---|---:|---:|---:|"
    reference: float | None = None
    for option in dict.fromkeys(line["optimizer"] for line in lines):
        own = [line for line in lines if line["optimizer"] == option]
        if not (complete := of_rates(own)):
            continue
        best = min(complete, key=lambda rate: mean(complete[rate]))
        reference = reference or mean(complete[best])
        tried = ", ".join(f"{rate:g}" for rate in sorted({line["lr"] for line in own}))
        each = ", ".join(f"{loss:.3f}" for loss in complete[best])
        change = f"{mean(complete[best]) / reference - 1:+.1%}".replace("-", "−")
        state = own[0]["state_bytes"] / own[0]["parameters"]
        yield f"| `{option}` | {tried} | {best:g} | {each} | {mean(complete[best]):.3f} | {change} | {state:.2f} |"


def main() -> None:
    model, *words = sys.argv[1:]
    file = next((Path(word.removeprefix("to=")) for word in words if word.startswith("to=")), DEFAULT_FILE)
    options = [option for word in words if not word.startswith("to=") for option in word.split(",")] or OPTIONS
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder)) as runs:
        bench = Bench(model, file, runs)
        for option in options:
            bench.complete(option)
        print("\n".join(table(bench.known())))


if __name__ == "__main__":
    main()
