"""docs/techniques.md as lines of Markdown, out of the rows of sweeps. Every figure is computed from a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean

from lowvram.config.registry import knob_of, neutral_options
from lowvram.results.columns import value_at
from lowvram.results.metrics import FILE_SIZE
from lowvram.results.row import MIB, Row, Status
from scripts.pages.technique_claims import CLAIMS, NOT_MEASURED, Found, percent, sizes, times
from scripts.pages.technique_rows import Sweep

HELD = ("peak", "weights", "gradients", "optimizer", "activations", "host")
COSTS = ("speed", "step, ms", "gradient error", "loss gap")
KINDS = ("parameters", "gradients", "optimizer", "activations", "host")
NAMES = {"transformer": "Transformer", "resnet": "ResNet"}
Cells = Callable[[Row, Row], Sequence[str]]  # of a row and the baseline
UNCHANGED_BYTES = 0.05 * MIB
# Effort that no fact of the code tells, and when to take which. No figures here.
WHEN = {
    "accum=x4": "Try it first, as long as a part still fills the device",
    "accum=x16": "Only a few samples fit at a time; such small parts leave a device partly idle",
    "adapter=lora": "Fine-tuning a trained model; not for training from scratch",
    "adapter=lora adapter.train_a=false": "The same, and activations don't fit",
    "ckpt=every1": "Activations are the largest kind at the peak",
    "ckpt=every2": "The same, if half the saving is enough",
    "ckpt=selective": "Matrix products are too expensive to compute again; the results between them don't fit",
    "logits=chunked": "Large vocabularies; nothing to gain with few classes",
    "offload=activations": "The link to the host is fast, and computing again is expensive",
    "offload=parameters": "The weights alone don't fit, and the host has room",
    "optimizer=adafactor": "State doesn't fit, and another update rule than Adam's is fine",
    "optimizer=adamw_4bit": "The 8-bit state is still too large",
    "optimizer=adamw_8bit": "State doesn't fit, and training should stay close to AdamW's",
    "optimizer=adamw_companded": "The same, with precision=bf16_split too",
    "optimizer=sgd": "It trains as well: often convolutional networks, seldom Transformers; a learning rate of its own",
    "optimizer=sgd optimizer.momentum=0.0": "There is no room for any state; seldom trains as well",
    "precision=bf16": "Always, on a device that computes in bf16",
    "precision=bf16_pure": "Weights and gradients don't fit, and noise in the weights is tolerable",
    "precision=bf16_split": "Weights and gradients don't fit, and updates should stay as exact as in fp32",
    "sharding=context sharding.ranks=2": "The activations of one sample don't fit: long sequences",
    "sharding=fsdp sharding.ranks=2": "Several devices, and weights, gradients and state don't fit on one",
    "sharding=pipeline sharding.ranks=2 accum=x4": "Weights, gradients and state don't fit on one, and links are slow",
    "sharding=tensor sharding.ranks=2": "The layers of one block don't fit, and devices are linked as by NVLink",
    "stepping=cpu_offload": "State doesn't fit, and the host has room for it and time to update",
    "stepping=in_backward": "Gradients don't fit; with several parts the host has room for their sum",
    "stepping=zeroth_order": "Fine-tuning a trained model where nothing but inference fits; learns slowly",
}
INTRODUCTION = """\
# What each technique saves, and costs

Made by `scripts/python scripts/pages/technique_table.py` from the rows of real sweeps in [docs/results](results)
(`*/techniques/`); a test compares the page with them. The numbers hold for their device and their size of model: to
measure on yours, run the command above each table.

Sizes are MiB. *Weights*, *gradients*, *optimizer* (its state), *activations* and *host* are each kind's own maximum
over the run; they are reached at different moments, so they don't add up to the peak. The first row has the baseline's
sizes, the others the change from it; a dot means none. *Speed* is throughput divided by the baseline's. *Gradient
error* and *loss gap* are [fidelity](measuring.md#fidelity), against fp32 without any saving, with the same optimizer. A
star marks [disturbed points](measuring.md#disturbed-points). What the columns mean: [measuring.md](measuring.md). Every
option of every knob: [knobs.md](knobs.md#measured).

Of [smaller models](smaller_models.md): the exported file beside the peak in training, which nothing that compresses
afterwards makes smaller; the held-out loss of the model, and through the file, which is loaded again; and the time of a
batch through the file over the fp32 model's.
"""


def page(devices: Mapping[str, Mapping[str, Found]]) -> str:
    """All of it: device -> model -> preset -> sweep."""
    lines = [INTRODUCTION]
    for device, models in devices.items():
        lines += ["## What the field says", "", about(models), "", *claims(models), ""]
        for model, found in models.items():
            for title, section in SECTIONS.items():
                if title in found:
                    lines += [f"## {NAMES.get(model, model)} on {device}: {HEADINGS[title]}", ""]
                    lines += [*ran(found[title]), "", *section(found[title]), ""]
    lines += ["## What to type, what it does to the numbers, when", "", *uses(devices)]
    return "\n".join(lines).rstrip("\n") + "\n"


def about(models: Mapping[str, Found]) -> str:
    """Device and versions, each once."""
    rows = [row for found in models.values() for sweep in found.values() for row in sweep.rows]
    where = ", ".join(machines(rows))
    return f"Measured on {where}. One run a point: small differences of speed mean nothing."


def machines(rows: Iterable[Row]) -> Iterable[str]:
    """Those on which points ran, each once."""
    return dict.fromkeys(machine(row) for row in rows if row["status"] == Status.OK)


def machine(row: Row) -> str:
    where = row["provenance"]
    threads = f"{where['threads']} thread{'s' * (where['threads'] != 1)} a process"
    return f"{where['device_name']}, torch {where['torch']}, {threads}"


def claims(models: Mapping[str, Found]) -> Iterator[str]:
    yield f"| the field says | {' | '.join(NAMES.get(model, model) for model in models)} |"
    yield "|---|" + "---|" * len(models)
    for claim, measured in CLAIMS.items():
        yield f"| {claim} | {' | '.join(measured(found) or NOT_MEASURED for found in models.values())} |"


def ran(sweep: Sweep) -> list[str]:
    """The command, on what, and of what size."""
    model = sweep.baseline["model"]
    size = f"{model['blocks']}, {model['parameters'] / 1e6:.2f} million parameters" if model["parameters"] else "?"
    return [
        "```bash",
        sweep.command,
        "```",
        "",
        f"{'; '.join(machines(sweep.rows))}; {size}; {len(sweep.rows)} points.",
    ]


def techniques(sweep: Sweep) -> Iterator[str]:
    """A row for each point, against the baseline: what it holds, and what that costs."""
    return rows_of(sweep, (*HELD, *COSTS), lambda row, base: [*held(row, base), *cost(row, base), *fidelity(row)])


def ranks(sweep: Sweep) -> Iterator[str]:
    """What each rank holds, beside a single process."""
    yield from rows_of(sweep, HELD, held)
    yield ""
    yield "The peak is the largest of all ranks, kinds are the first rank's. Ranks share out the batch, or in a row of"
    yield "`tensor`, `context` or `pipeline` the layers, the tokens or the blocks."
    yield "Ranks that share cores don't show the speed of several devices, so none is given."


def rows_of(sweep: Sweep, titles: Sequence[str], cells: Cells) -> Iterator[str]:
    """A table with a row for each point."""
    yield f"| | {' | '.join(titles)} |"
    yield "|---|" + "---:|" * len(titles)
    for row in sweep.rows:
        name = f"`{sweep.words(row)}`" if row is not sweep.baseline else "baseline"
        name += "\\*" if row["disturbed"] else ""
        if row["status"] != Status.OK:
            yield f"| {name} | {row['status']}: {row['reason']} |" + " |" * (len(titles) - 1)
        else:
            yield f"| {name} | {' | '.join(cells(row, sweep.baseline))} |"


def held(row: Row, base: Row) -> list[str]:
    return [peak(row, base), *kinds(row, base)]


def peak(row: Row, base: Row) -> str:
    ratio = times(row, base, "memory.peak_bytes")
    return sizes(row, "memory.peak_bytes") + ("" if row is base else f" ({percent(ratio)})")


def kinds(row: Row, base: Row) -> Iterator[str]:
    """The maximum of each: the baseline's own, and what others change of it."""
    for kind in KINDS:
        here, there = (value_at(each, f"memory.by_kind_max.{kind}") for each in (row, base))
        if here is None or there is None:
            yield ""
        elif row is base:
            yield f"{here / MIB:.1f}"
        else:
            yield signed(here - there)


def signed(num_bytes: float) -> str:
    return "·" if abs(num_bytes) < UNCHANGED_BYTES else f"{num_bytes / MIB:+.1f}".replace("-", "−")


def cost(row: Row, base: Row) -> Iterator[str]:
    ratio = times(row, base, "throughput.samples_per_s")
    yield "1" if row is base else "" if ratio is None else f"{ratio:.2f}"
    middle, low, high = (value_at(row, f"time.step_ms_{part}") for part in ("p50", "p05", "p95"))
    yield f"{middle:.0f} ({low:.0f}–{high:.0f})" if middle and low and high else ""


def fidelity(row: Row) -> Iterator[str]:
    error, gap = (value_at(row, f"fidelity.{name}") for name in ("gradient_error", "loss_gap"))
    yield "" if error is None else f"{error:.1e}" if error else "0"
    yield "" if gap is None else f"{gap:.3f}" if gap else "0"


def batches(sweep: Sweep) -> Iterator[str]:
    """As many samples in batches of several sizes: a line for each size, over seeds."""
    yield "| batch | updates | peak | evaluation loss: mean (range over seeds) | seeds |"
    yield "|---:|---:|---:|---:|---:|"
    for size, rows in by_batch(sweep.rows).items():
        losses = [row["loss"]["eval"] for row in rows]
        spread = f"{mean(losses):.3f} ({min(losses):.3f}–{max(losses):.3f})"
        cells = (str(size), str(rows[0]["config"]["train"]["steps"]), sizes(rows[0], "memory.peak_bytes"))
        yield f"| {' | '.join(cells)} | {spread} | {len(rows)} |"


def by_batch(rows: Sequence[Row]) -> dict[int, list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row["status"] == Status.OK:
            groups.setdefault(row["config"]["train"]["batch_size"], []).append(row)
    return dict(sorted(groups.items()))


def smaller(sweep: Sweep) -> Iterator[str]:
    """A row for each point: what training held, how large the exported file is, and what the model has lost."""
    yield "| | peak in training | file | loss | loss through the file | a batch through it |"
    yield "|---|" + "---:|" * 5
    for row in sweep.rows:
        if row["status"] != Status.OK:
            yield f"| {row['name']} | {row['status']}: {row['reason']} |" + " |" * 4
        else:
            yield f"| {row['name']} | {' | '.join(compressed(row, sweep.baseline))} |"


def compressed(row: Row, base: Row) -> Iterator[str]:
    yield peak(row, base) if value_at(row, "memory.by_kind_max.gradients") else "trains nothing"
    file = value_at(row, FILE_SIZE)
    yield (
        ""
        if file is None
        else f"{file / MIB:.2f}" + ("" if row is base else f" ({percent(times(row, base, FILE_SIZE))})")
    )
    for path in ("loss.eval", "eval.loss_exported"):
        loss = value_at(row, path)
        yield "" if loss is None else f"{loss:.4f}"
    exported, plain = (value_at(row, f"export.latency_{which}") for which in ("ms", "fp32_ms"))
    yield f"{exported / plain:.2f}" if exported and plain else ""


def uses(devices: Mapping[str, Mapping[str, Found]]) -> Iterator[str]:
    """Of each technique that was tried: the knob's own facts, and when to take it."""
    tried = [
        sweep.words(row)
        for models in devices.values()
        for found in models.values()
        for name in ("one_at_a_time", "sharding")
        if (sweep := found.get(name))
        for row in sweep.rows
    ]
    yield "| type | acts on | its gradients are | needs that | when |"
    yield "|---|---|---|---|---|"
    for words in dict.fromkeys(tried):
        if words in WHEN:
            knob = knob_of(option_of(words))
            needs = "; ".join(sorted(fact.value for fact in knob.needs()))
            cells = (knob.saves.value if knob.saves else "", knob.exactness.value, needs, WHEN[words])
            yield f"| `{words}` | {' | '.join(cells)} |"


def option_of(words: str) -> tuple[str, str]:
    """The knob's group and option among the words of a point."""
    pairs = [word.partition("=") for word in words.split()]
    return next((group, option) for group, _, option in pairs if group in neutral_options())


SECTIONS = {
    "one_at_a_time": techniques,
    "waterfall": techniques,
    "sharding": ranks,
    "batch_size": batches,
    "compression": smaller,
}
HEADINGS = {
    "one_at_a_time": "one technique at a time",
    "waterfall": "one after another",
    "sharding": "over several ranks",
    "batch_size": "the batch size",
    "compression": "smaller models",
}
