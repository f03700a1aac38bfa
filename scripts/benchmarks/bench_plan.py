"""How long plans take: a first trace, a price, and a sweep through the planner.

    scripts/python scripts/benchmarks/bench_plan.py [rounds]

Milliseconds of this process's CPU time on one thread, for a card, after all imports: medians with their range. A plan
is all that `Planner` does: the trace or its price, what an allocator makes of it, the step's time, the row. The first
pass over the sweep traces its structures too; in the second all is priced. What else the process that plans does for a
point, checking its configuration, stands in a line of its own.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from lowvram.config.compose import chosen, plain
from lowvram.config.defaults import CONF
from lowvram.config.identity import register_resolvers
from lowvram.config.settings import Settings, settings
from lowvram.planning.estimate import Fields
from lowvram.planning.worker import Planner

Point = tuple[Settings, dict[str, str]]  # and its choices
COMMON = ["mode=plan", "data=synthetic", "plan.device=h100", "train.batch_size=8"]
MODELS = ["gpt2", "gpt2_xl", "resnet50"]
SWEPT = "gpt2"
STRUCTURES = [("precision=fp32", "precision=bf16"), ("ckpt=none", "ckpt=every1"), ("optimizer=adamw", "optimizer=sgd")]
PARTS = [f"accum.parts={parts}" for parts in (1, 2, 3, 4, 8)]
BATCH_SIZES = range(24, 24 * 26, 24)  # each divides into all of these parts


def composed(words: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """A configuration and its choices."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*COMMON, *words], return_hydra_config=True)
    return plain(config), chosen(config.hydra.runtime.choices)


def point(words: Iterable[str]) -> Point:
    config, choices = composed(words)
    return settings(config), choices


def with_batch(point: Point, batch_size: int) -> Point:
    whole, choices = point
    return replace(whole, train=replace(whole.train, batch_size=batch_size)), choices


def sweep() -> list[Point]:
    """Every batch size and accumulation of every structure."""
    kinds = [point([f"model={SWEPT}", "accum=x2", *words]) for words in product(*STRUCTURES, PARTS)]
    return [with_batch(kind, batch_size) for kind in kinds for batch_size in BATCH_SIZES]


def cpu_ms(action: Callable[[], Any]) -> float:
    began = time.process_time()
    action()
    return 1e3 * (time.process_time() - began)


def plan_ms(planner: Planner, point: Point) -> float:
    told: list[Fields] = []
    taken_ms = cpu_ms(lambda: told.append(planner.fields(*point)))
    assert told[0]["status"] == "ok", told
    return taken_ms


def shown(name: str, times_ms: list[float]) -> str:
    low, middle, high = min(times_ms), statistics.median(times_ms), max(times_ms)
    return f"{name:34} {middle:8.1f} ms (from {low:.1f} to {high:.1f}, {len(times_ms)} times)"


def time_model(model: str, rounds: int) -> Iterator[str]:
    config, _ = composed([f"model={model}"])
    it = point([f"model={model}"])
    yield shown(f"{model}, the first plan here", [plan_ms(Planner(), it)])
    yield shown(f"{model}, again from the start", [plan_ms(Planner(), it) for _ in range(rounds)])
    planner = Planner()
    for batch_size in (8, 9):
        plan_ms(planner, with_batch(it, batch_size))  # two traces
    prices_ms = [plan_ms(planner, with_batch(it, batch_size)) for batch_size in range(10, 10 + 4 * rounds)]
    yield shown(f"{model}, a price", prices_ms)
    yield shown(f"{model}, its configuration", [cpu_ms(lambda: settings(config)) for _ in range(rounds)])


def time_sweep() -> Iterator[str]:
    planner, points = Planner(), sweep()
    for name in ("first", "second"):
        times_ms = [plan_ms(planner, point) for point in points]
        per_minute = len(points) / (sum(times_ms) / 60e3)
        yield f"{shown(f'sweep, {name} pass, a point', times_ms)}: {per_minute:,.0f} points a minute"
    num_traces = sum(len(known.traces) for scaler in planner.scalers.values() for known in scaler.known.values())
    yield f"{num_traces} traces of {len(points)} points"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    register_resolvers()
    gc.collect()
    gc.freeze()  # as the fork server does before it plans
    print(f"torch {torch.__version__}")
    for model in MODELS:
        for line in time_model(model, rounds):
            print(line, flush=True)
    for line in time_sweep():
        print(line, flush=True)


if __name__ == "__main__":
    main()
