"""What the field says of techniques, each beside what the rows say of it. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from statistics import mean

from lowvram.results.columns import value_at
from lowvram.results.metrics import FILE_SIZE
from lowvram.results.row import MIB, Row, Status
from scripts.pages.technique_rows import Sweep

Found = Mapping[str, Sweep]  # of one model on one device, by preset
Measured = Callable[[Found], "str | None"]
NOT_MEASURED = "not measured here"
STATES = ("parameters", "gradients", "optimizer")
ACCUMULATION = re.compile(r"accum=\w+")  # and nothing else
SGD = "optimizer=sgd"
SGD_ALONE = "optimizer=sgd optimizer.momentum=0.0"


def times(row: Row, base: Row, path: str) -> float | None:
    """The row's value over the baseline's."""
    here, there = value_at(row, path), value_at(base, path)
    return None if here is None or not there else here / there


def percent(ratio: float | None) -> str:
    """The change that a ratio is."""
    if ratio is None:
        return "?"
    change = round(100 * (ratio - 1))
    return f"{change:+} %".replace("-", "−") if change else "0 %"


def sizes(row: Row, path: str) -> str:
    found = value_at(row, path)
    return "" if found is None else f"{found / MIB:.1f}"


def changed(words: str, path: str) -> Measured:
    """Of one point against the baseline."""

    def measured(found: Found) -> str | None:
        sweep = found.get("one_at_a_time")
        row = sweep and sweep.found(words)
        ratio = times(row, sweep.baseline, path) if sweep and row else None
        return None if ratio is None else f"`{words}`: {percent(ratio)}"

    return measured


def states(words: str) -> Measured:
    """Weights, gradients and state together."""

    def measured(found: Found) -> str | None:
        sweep = found.get("one_at_a_time")
        row = sweep and sweep.found(words)
        if not sweep or not row:
            return None
        here, there = held(row), held(sweep.baseline)
        return f"`{words}`: {percent(here / there)}" if here and there else None

    return measured


def held(row: Row) -> float | None:
    """Bytes of weights, gradients and the optimizer's state: the sum of their maxima."""
    parts = [value_at(row, f"memory.by_kind_max.{kind}") for kind in STATES]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def activations(row: Row) -> float | None:
    return value_at(row, ACTIVATIONS)


def each(*measured: Measured) -> Measured:
    """All that is known of several."""
    return lambda found: "; ".join(filter(None, (one(found) for one in measured))) or None


def first(*measured: Measured) -> Measured:
    """What the first of several knows that knows anything."""
    return lambda found: next(filter(None, (one(found) for one in measured)), None)


def in_all(found: Found) -> str | None:
    """The smallest peak of the waterfall, what of it is not plain accumulation, and its price; its speed where others
    took no part of the processor."""
    sweep = found.get("waterfall")
    fitting = [row for row in sweep.rows if row["status"] == Status.OK] if sweep else []
    if not sweep or len(fitting) < 2:
        return None
    last = min(fitting, key=lambda row: row["memory"]["peak_bytes"])
    factor = 1 / (times(last, sweep.baseline, "memory.peak_bytes") or 1)
    words = [f"{factor:.1f} times less"]
    accumulated = next((row for row in fitting if ACCUMULATION.fullmatch(sweep.words(row))), None)
    if accumulated:
        beyond = accumulated["memory"]["peak_bytes"] / last["memory"]["peak_bytes"]
        words.append(f"{beyond:.1f} times beyond plain accumulation")
    if not (last["disturbed"] or sweep.baseline["disturbed"]):
        words.append(f"at {times(last, sweep.baseline, 'throughput.samples_per_s') or 0:.2f} of the speed")
    error = value_at(last, "fidelity.gradient_error")
    return ", ".join([*words, *([f"gradient error {error:.1e}"] if error is not None else [])])


def of_ranks(option: str, size: Callable[[Row], float | None]) -> Measured:
    """A size of the first rank, for each number of ranks, over that of a process that has all of it.

    Args:
        option: of sharding; its ranks are one row, and nothing else but the parts of a batch is chosen with it.
    """

    def measured(found: Found) -> str | None:
        sweep = found.get("sharding")
        return sweep and (", ".join(said(sweep)) or None)

    def said(sweep: Sweep) -> Iterator[str]:
        for row in sweep.rows:
            fitting = re.fullmatch(rf"sharding={option} sharding\.ranks=(\d+)(?: accum=\w+)?", sweep.words(row))
            if fitting and row["status"] == Status.INCOMPATIBLE:
                yield f"refused on {fitting[1]} ranks"
            elif fitting and row["status"] == Status.OK and (here := size(row)) and (there := size(sweep.baseline)):
                yield f"{there / here:.1f} times less on {fitting[1]} ranks"

    return measured


def convergence(found: Found) -> str | None:
    """The evaluation's loss and the peak, from the smallest to the largest batch of as many samples."""
    sweep = found.get("batch_size")
    rows = [row for row in sweep.rows if row["status"] == Status.OK] if sweep else []
    seen = sorted({row["config"]["train"]["batch_size"] for row in rows})
    if len(seen) < 2:
        return None
    ends = [[row for row in rows if row["config"]["train"]["batch_size"] == size] for size in (seen[0], seen[-1])]
    losses = [mean(row["loss"]["eval"] for row in end) for end in ends]
    peaks = [sizes(end[0], "memory.peak_bytes") for end in ends]
    return (
        f"batch {seen[0]} to {seen[-1]}: evaluation loss {losses[0]:.3f} to {losses[1]:.3f}, "
        f"peak {peaks[0]} to {peaks[1]} MiB"
    )


def compressed(name: str, against: str = "baseline", *, loaded: bool = False) -> Measured:
    """A point of sweep=compression beside another one: its peak in training, its file and its loss.

    Args:
        loaded: whether its loss is the one through the exported file.
    """

    def measured(found: Found) -> str | None:
        sweep = found.get("compression")
        row, other = (sweep.named(each) if sweep else None for each in (name, against))
        if row is None or other is None:
            return None
        if row["status"] != Status.OK:
            return f"{name}: refused"
        loss = value_at(row, "eval.loss_exported" if loaded else "loss.eval")
        words = [
            f"{title} {percent(times(row, other, path))}" for title, path in {"peak": PEAK, "file": FILE_SIZE}.items()
        ]
        words.append(f"loss {value_at(other, 'loss.eval'):.3f} to {loss:.3f}")
        return f"{name}: {', '.join(words)}"

    return measured


def early(found: Found) -> str | None:
    """What leaving at an exit saves of the blocks, and costs."""
    sweep = found.get("compression")
    row = sweep.named("early exit") if sweep else None
    if row is None:
        return None
    used, whole, left = (value_at(row, path) for path in ("eval.blocks_used", "loss.eval", "eval.loss_early"))
    return None if used is None else f"{used:.1%} of the blocks, loss {whole:.3f} to {left:.3f}"


def elsewhere(place: str) -> Measured:
    """Of what no sweep of this page holds: where its own measurement stands."""
    return lambda found: f"[measured there]({place})"


KNOBS = "knobs.md#measured"
PEAK, ACTIVATIONS = "memory.peak_bytes", "memory.by_kind_max.activations"
CLAIMS: dict[str, Measured] = {
    "All together: up to 20 times less memory": in_all,
    "Checkpointing: 40 to 50 % less for activations": each(
        *(changed(words, ACTIVATIONS) for words in ("ckpt=every1", "ckpt=every2", "ckpt=selective"))
    ),
    "Mixed precision: half of the activations": each(
        *(changed(words, ACTIVATIONS) for words in ("precision=bf16", "precision=bf16_pure"))
    ),
    "Mixed precision: half of the peak": each(
        *(changed(words, PEAK) for words in ("precision=bf16", "precision=bf16_pure"))
    ),
    "SGD for Adam: about two thirds less, of weights, gradients and state": each(states(SGD), states(SGD_ALONE)),
    "SGD for Adam: the same, of the peak": each(changed(SGD, PEAK), changed(SGD_ALONE, PEAK)),
    "FSDP: up to ten-fold less for weights, gradients and state": of_ranks("fsdp", held),
    "Tensor parallelism: each rank has its share of the weights, gradients and state of a layer": first(
        of_ranks("tensor", held), elsewhere(KNOBS)
    ),
    "Pipeline parallelism: each rank has those of its layers alone": first(
        of_ranks("pipeline", held), elsewhere(KNOBS)
    ),
    "Context parallelism (sequence parallelism): each rank has its share of the activations": first(
        of_ranks("context", activations), elsewhere(KNOBS)
    ),
    "Pruning: half of a model leaves at little loss": compressed("pruned, trained on", "trained on"),
    "Sparse weights: a smaller model": each(compressed("half of the weights"), compressed("2 of 4 weights")),
    "8 bits: a quarter of the size at hardly any loss": each(
        *(compressed(name, loaded=True) for name in ("8 bits", "graph of 8 bits", "8 bits, as a graph"))
    ),
    "4 bits: an eighth of the size at little loss": compressed("4 bits", loaded=True),
    "Distillation: a smaller model that is nearly as good": compressed("pruned, taught", "pruned, trained on"),
    "Stochastic depth: better deep models": compressed("stochastic depth"),
    "LayerDrop: less memory and time": compressed("a block left out"),
    "Early exits: faster answers": early,
    "Growing a model: less training": elsewhere("dynamic_depth.md#what-it-saved"),
    "Local attention: memory grows with the length, not with its square": elsewhere("local_attention.md#what-it-saves"),
    "Caching decoded data: no waiting": elsewhere("your_own_data.md#decoding-images-once"),
    "LARS, LAMB and scaled learning rates: large batches train as well": elsewhere("large_batches.md#measured"),
    "Small batches converge better for as many samples": convergence,
}
