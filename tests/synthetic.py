"""Sweeps that nobody ran, for tests of what shows them. The figures are made up."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from lowvram.config.registry import neutral_options
from lowvram.results.row import MIB, Row, empty_row, merge, write

# What a name, a reason or a command could hold to run as a program.
HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\">' onload='x' <!--<script>\u2028&lt;$data"
HOSTILE_FOLDER = '"><img src=x onerror=alert(1)>&lt;$data'
SAVES = {
    "bf16": 0.65,
    "fp16": 0.66,
    "every2": 0.62,
    "every1": 0.36,
    "x2": 0.52,
    "x8": 0.15,
    "sgd": 0.97,
    "chunked": 0.9,
}
COSTS = {"bf16": 1.4, "fp16": 1.3, "every2": 0.88, "every1": 0.8, "x2": 0.97, "x8": 0.8, "sgd": 1.02, "chunked": 0.98}


def point(index: int, changes: dict[str, str], peak_mib: float = 400.0, **fields: Any) -> Row:
    """A row that ran to its end, of a Transformer with these options."""
    scale, pace = 1.0, 1.0
    for option in changes.values():
        scale, pace = scale * SAVES.get(option, 1.0), pace * COSTS.get(option, 1.0)
    peak, speed = int(peak_mib * MIB * scale), 200 * pace
    states = {"parameters": peak // 50, "gradients": peak // 100, "optimizer": peak // 25, "inputs": peak // 400}
    by_kind = {**states, "activations": peak - sum(states.values()), "other": 0, "host": 5}
    known = {
        "id": f"{index:016x}",
        "name": "-".join(changes.values()) or "baseline",
        "index": index,
        "status": "ok",
        "choices": {"model": "transformer", **neutral_options(), "mode": "measure", **changes},
        "config": {"train": {"batch_size": 32}, **{name: {"_target_": value} for name, value in changes.items()}},
        "memory": {"peak_bytes": peak, "source": "tensor_ledger", "by_kind": by_kind, "by_kind_max": by_kind},
        "plan": {"allocated_bytes": int(peak * 1.02)},
        "throughput": {"samples_per_s": speed, "tokens_per_s": speed * 128},
        "time": {"step_ms_p50": 32e3 / speed, "steps": 10},
        "loss": {"last": 3.9 + index / 1000, "eval": 3.8 + index / 1000},
        "provenance": {"device_name": "a card", "lowvram": "1", "torch": "2", "command": f"python train.py {index}"},
    }
    return merge(merge(empty_row(), known), fields)


def failed(index: int, status: str, reason: str | None, **fields: Any) -> Row:
    """A row that says how its point ended instead."""
    nothing = {"peak_bytes": None, "source": None, "by_kind": None, "by_kind_max": None}
    row = point(index, {"precision": "fp8"}, status=status, reason=reason, name=status, memory=nothing)
    for section in ("throughput", "time", "loss"):
        row[section] = dict.fromkeys(row[section])
    return merge(row, fields)


def leave(folder: Path, rows: list[Row], num_steps: int = 60) -> Path:
    """A sweep's folder with these points, each with its losses."""
    for row in rows:
        place = folder / row["id"]
        place.mkdir(parents=True)
        write(place, row)
        if row["status"] == "ok":
            losses = ((step, 3 + 3 / (step + row["index"] % 5)) for step in range(1, num_steps + 1))
            lines = (json.dumps({"step": step, "loss/train": loss}) for step, loss in losses)
            (place / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def waterfall() -> list[Row]:
    """Knobs added one by one, accumulation first."""
    added = {"accum": "x8", "ckpt": "every1", "precision": "bf16", "logits": "chunked", "optimizer": "sgd"}
    names = list(added)
    return [point(i, {name: added[name] for name in names[:i]}) for i in range(len(names) + 1)]


def grid(num_rows: int) -> list[Row]:
    """Every combination of some options, the last four of them failed."""
    options = {
        "precision": ["fp32", "bf16", "fp16"],
        "ckpt": ["none", "every2", "every1"],
        "accum": ["none", "x2", "x8"],
        "optimizer": ["adamw", "sgd"],
        "logits": ["full", "chunked"],
        "offload": ["none", "activations"],
    }
    combinations = list(product(*options.values()))[: num_rows - 4]
    rows = [point(i, dict(zip(options, each, strict=True))) for i, each in enumerate(combinations)]
    reasons = {
        "oom": "out of memory in the backward pass",
        "incompatible": "fp8 needs a card",
        "killed": "killed",
        "skipped": "planned not to fit",
    }
    return rows + [failed(len(rows) + i, *one) for i, one in enumerate(reasons.items())]
