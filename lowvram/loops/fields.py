"""The fields of a row that the child process computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.core.held import held_bytes
from lowvram.core.knob import Knob
from lowvram.core.layers import num_packed
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Task
from lowvram.core.shards import class_name
from lowvram.core.stages import sizes_of
from lowvram.data.spec import TEXTS
from lowvram.loops.evaluate import Evaluation
from lowvram.loops.session import Session
from lowvram.results.row_fields import nested

GIB = 2**30
Fields = dict[str, Any]


def merged(*fragments: Fields) -> Fields:
    """Fragments of a row as one; sections that several of them have are merged."""
    whole: Fields = {}
    for fragment in fragments:
        for name, value in fragment.items():
            whole[name] = {**whole.get(name, {}), **value} if isinstance(value, dict) else value
    return whole


def common(session: Session) -> Fields:
    """The fields that all modes have: the model, changed semantics, the loss scale, and the noise scale."""
    about = about_model(session.problem, session.rig.model, session.knobs.values())
    return merged(about, nested(session.rig.stepper.figures()), session.noise.fields())


def trained(session: Session) -> Fields:
    """As `common`, of a run that has made all of its steps."""
    told = common(session)
    remark = session.rig.stepper.remark()
    return told | {"semantics_changed": f"{told['semantics_changed']}; {remark}"} if remark else told


def about_model(task: Task, model: nn.Module, knobs: Iterable[Knob]) -> Fields:
    """The fields about the model that are known before it runs, and how knobs change what it computes."""
    sizes = sizes_of(model)
    return {
        "model": {
            "parameters": sum(size for size, _ in sizes) + num_packed(model),
            "trainable": sum(size for size, trains in sizes if trains),
            "blocks": described_blocks(task.structure(model).blocks),
        },
        "semantics_changed": "; ".join(filter(None, (knob.caveat(model) for knob in knobs))) or None,
    }


def described_blocks(blocks: Iterable[nn.Module]) -> str:
    """How many blocks there are of each class, such as "4 Block"."""
    counted = Counter(map(class_name, blocks))
    return ", ".join(f"{count} {name}" for name, count in counted.items())


def losses(first: float, last: float, evaluation: Evaluation) -> Fields:
    return {"loss": {"first": first, "last": last, "eval": evaluation.loss}, "eval": evaluation.scores}


def pace(
    session: Session, token_counts: list[Tensor], seconds: float, num_samples: int | None = None
) -> dict[str, float]:
    """Throughput of all ranks, without padding, by the names that metrics.jsonl and loggers use.

    Args:
        token_counts: of each step on this rank, see `Problem.token_counts`.
        num_samples: of these steps, over all ranks; None: all batches are of the full size.
    """
    num_steps = len(token_counts)
    num_samples = num_steps * session.settings.train.batch_size if num_samples is None else num_samples
    values = {"throughput/samples_per_s": num_samples / seconds}
    if session.data.spec.modality in TEXTS:
        num_tokens, num_places = data_ranks().sum(torch.stack(token_counts).sum(0).to(session.rig.device)).tolist()
        values |= {"throughput/tokens_per_s": num_tokens / seconds, "data/padding": 1 - num_tokens / num_places}
    return values | {"time/step_ms": 1e3 * seconds / num_steps}


def times(
    session: Session,
    step_ms: list[float],
    waits_s: list[float],
    token_counts: list[Tensor],
    num_samples: int | None = None,
) -> Fields:
    """Throughput, and the median and spread of the time of the timed steps; without timed steps, only their number.

    Args:
        step_ms, waits_s, token_counts: of each timed step: its time, the wait for its data, `Problem.token_counts`.
        num_samples: of these steps, over all ranks; None: all batches are of the full size.
    """
    if not step_ms:
        return {"time": {"steps": 0}}
    seconds = sum(step_ms) / 1e3
    values = pace(session, token_counts, seconds, num_samples)
    p05, p50, p95 = percentiles(step_ms)
    return {
        **nested({name.replace("/", "."): value for name, value in values.items()}),
        "time": {
            "step_ms_p50": p50,
            "step_ms_p05": p05,
            "step_ms_p95": p95,
            "steps": len(step_ms),
            "data_wait_frac": min(1.0, sum(waits_s) / seconds),
        },
    }


def of_data(session: Session) -> Fields:
    """What the loader made of the data. A collective: all ranks must call it."""
    return nested(session.data.figures(session.rig.device))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 5th percentile, the median and the 95th percentile of at least one value."""
    p05, *_, p95 = quantiles(values, n=20, method="inclusive") if len(values) > 1 else (values[0], values[0])
    return p05, median(values), p95


def memory_now(session: Session) -> dict[str, float]:
    """Memory that can be read without disturbing the training, by the names that metrics.jsonl and loggers use."""
    if session.rig.device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return {"memory/peak_gib": peak / GIB, "memory_now/allocated_gib": allocated / GIB}
    return {"memory/process_gib": (status_bytes("VmHWM") - session.resident_bytes) / GIB}


def memory_held(session: Session) -> dict[str, float]:
    """Memory by kind that is held between two steps. It takes a few milliseconds for a large model."""
    held = held_bytes(session.rig.model, session.rig.stepper, session.rig.teacher)
    return {f"memory_now/{kind.value}_gib": num_bytes / GIB for kind, num_bytes in held.items()}


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, in bytes: VmHWM (peak of resident memory), VmRSS (resident), VmData …"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
