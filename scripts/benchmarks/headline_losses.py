"""Losses of the smallest peaks: each point of `sweep=smallest` beside the reference, three seeds of both, after as many
samples. Part of bench_headline.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from lowvram.fidelity.band import Bounds, band
from lowvram.results.row import MIB, Row, Status

SEEDS = (0, 1, 2)
COMMON = (
    *("mode=train", "logger=none", "device=cpu", "train.steps=100", "data.eval_samples=128"),
    f"seed={','.join(map(str, SEEDS))}",
)
SIZES = {
    "transformer": ("model=transformer", "train.batch_size=8"),
    "resnet": ("model=resnet", "data.image_size=32", "train.batch_size=16"),
}


def in_parts(words: str, batch_size: int) -> str:
    """The words of a point with as many parts as they say, and at most one for each sample."""
    own = [word for word in words.split() if not word.startswith("accum")]
    if numbers := re.findall(r"accum\S*=x?(\d+)", words):  # the last counts
        own.append(f"accum=x{min(int(numbers[-1]), batch_size)}")
    return " ".join(own)


def lines(rows: Sequence[Row], points: Mapping[str, str]) -> Iterator[str]:
    """A table. A point without words but `model.…` is the reference of those after it."""
    numbers = ", ".join(map(str, SEEDS))
    yield f"| point | peak MiB | evaluation loss, seeds {numbers} | mean | to the reference | inside |"
    yield "|---|---:|---|---:|---:|---:|"
    reference: list[float] = []
    for name, words in points.items():
        own = [row for row in rows if (row["name"] or "").removesuffix(f"-seed{row['config']['seed']}") == name]
        failed = [f"{row['status']}: {row['reason']}" for row in own if row["status"] != Status.OK]
        if failed or not own:
            yield f"| {name} | {(failed or ['not run'])[0]} |" + " |" * 4
            continue
        losses = [row["loss"]["eval"] for row in own]
        if is_reference := all(word.startswith("model.") for word in words.split()):
            reference = losses
        beside = (range_of(losses), "") if is_reference else compared(losses, reference)
        cells = (name, f"{own[0]['memory']['peak_bytes'] / MIB:.2f}", seeds(losses), f"{fmean(losses):.4f}", *beside)
        yield f"| {' | '.join(cells)} |"
    yield "\n*To the reference*: of a reference its band, the mean of its seeds plus and minus the difference between"
    yield "the largest and the smallest; of other points the difference of the means. *Inside*: the seeds in that band."
    yield "\nThe words of each point:\n"
    yield from (f"- {name}: `{words or 'none'}`" for name, words in points.items())


def bounds_of(losses: Sequence[float]) -> Bounds:
    (bounds,) = band([[loss] for loss in losses])
    return bounds


def seeds(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def range_of(losses: Sequence[float]) -> str:
    bounds = bounds_of(losses)
    return f"{bounds.low:.4f} to {bounds.high:.4f}"


def compared(losses: Sequence[float], reference: Sequence[float]) -> tuple[str, str]:
    """How far the means are from each other, and how many seeds lie in the reference's band."""
    bounds = bounds_of(reference)
    inside = sum(bounds.low <= loss <= bounds.high for loss in losses)
    change = f"{fmean(losses) / bounds.mean - 1:+.1%}".replace("-", "−")
    return change, f"{inside} of {len(losses)}"
