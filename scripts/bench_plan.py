"""How long plans take: a first trace, a price, and a sweep through the planner.

    scripts/python scripts/bench_plan.py [rounds]

Milliseconds of this process's CPU time on one thread, for a card, after torch's import: medians with their range. A
point of the sweep costs what the process that plans does for it: its settings, its price, what an allocator makes of
it, its time, its row. The first pass over the sweep traces its structures too; in the second all is priced.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from lowvram.cli import chosen, plain
from lowvram.identity import CONF, register_resolvers
from lowvram.modes.plan import Planner
from lowvram.settings import settings

Point = tuple[dict[str, Any], dict[str, str]]  # configuration, choices
COMMON = ["mode=plan", "data=synthetic", "plan.device=h100", "train.batch_size=8"]
MODELS = ["gpt2", "gpt2_xl", "resnet50"]
SWEPT = "gpt2"
STRUCTURES = [("precision=fp32", "precision=bf16"), ("ckpt=none", "ckpt=every1"), ("optimizer=adamw", "optimizer=sgd")]
PARTS = [["accum=none"], *[["accum=x2", f"accum.parts={parts}"] for parts in (2, 3, 4, 8)]]
BATCH_SIZES = range(24, 24 * 26, 24)  # each divides into all of these parts


def composed(*words: str) -> Point:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*COMMON, *words], return_hydra_config=True)
    return plain(config), chosen(config.hydra.runtime.choices)


def with_batch(point: Point, batch_size: int) -> Point:
    config, choices = point
    return {**config, "train": {**config["train"], "batch_size": batch_size}}, choices


def sweep() -> list[Point]:
    """Every batch size and accumulation of every structure."""
    kinds = [composed(f"model={SWEPT}", *words, *parts) for *words, parts in product(*STRUCTURES, PARTS)]
    return [with_batch(kind, batch_size) for kind in kinds for batch_size in BATCH_SIZES]


def cpu_ms(planner: Planner, point: Point) -> float:
    """Of one plan."""
    config, choices = point
    began = time.process_time()
    fields = planner.fields(settings(config), choices)
    taken_ms = 1e3 * (time.process_time() - began)
    assert fields["status"] == "ok", fields
    return taken_ms


def shown(name: str, times_ms: list[float]) -> str:
    low, middle, high = min(times_ms), statistics.median(times_ms), max(times_ms)
    return f"{name:34} {middle:8.1f} ms (from {low:.1f} to {high:.1f}, {len(times_ms)} times)"


def time_model(model: str, rounds: int) -> Iterator[str]:
    point = composed(f"model={model}")
    yield shown(f"{model}, the first plan here", [cpu_ms(Planner(), point)])
    yield shown(f"{model}, again from the start", [cpu_ms(Planner(), point) for _ in range(rounds)])
    planner = Planner()
    for batch_size in (8, 9):
        cpu_ms(planner, with_batch(point, batch_size))  # the two traces
    prices = [cpu_ms(planner, with_batch(point, batch_size)) for batch_size in range(10, 10 + 4 * rounds)]
    yield shown(f"{model}, a price", prices)


def time_sweep() -> Iterator[str]:
    planner, points = Planner(), sweep()
    for name in ("first", "second"):
        times_ms = [cpu_ms(planner, point) for point in points]
        per_minute = len(points) / (sum(times_ms) / 60e3)
        yield f"{shown(f'sweep, {name} pass, a point', times_ms)}: {per_minute:,.0f} points a minute"
    num_traces = sum(len(known.traces) for pricer in planner.pricers.values() for known in pricer.known.values())
    yield f"{num_traces} traces of {len(points)} points"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    register_resolvers()
    print(f"torch {torch.__version__}")
    for model in MODELS:
        for line in time_model(model, rounds):
            print(line, flush=True)
    for line in time_sweep():
        print(line, flush=True)


if __name__ == "__main__":
    main()
