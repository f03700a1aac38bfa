"""What each knob saves, costs in speed and costs in accuracy: one option at a time against the baseline.

    scripts/python scripts/benchmarks/bench_knobs.py [rounds] [only=GROUP,GROUP=OPTION] [to=FILE] [times=no] [overrides]
    scripts/python scripts/benchmarks/bench_knobs.py 3 only=logits model=gpt2 data=synthetic train.batch_size=4
    scripts/python scripts/benchmarks/bench_knobs.py 1 only=sharding=zero1 to=docs/results/cpu/bench_knobs.jsonl

Points of the command line, each in a fresh process. Every round goes through all options, with a baseline before and
after each two of them; an option's step time is divided by the mean of the baselines around it, and the table has the
median over rounds with its range. Bytes are of the last round (they repeat). The gradient error is relative to fp64 at
the same weights: one plain SGD step of a large rate, read off the saved weights. Runs on the CPU and on CUDA; options
that the machine can't have are named with the reason.

Some options have further rows, with other values of their fields (FURTHER). times=no is for a machine that does other
work meanwhile: bytes and errors are as ever, and no times are kept; a later round may bring them.

What was measured is kept in FILE (outputs/bench_knobs.jsonl), line by line, and not measured again: more rounds, or a
new option, add to it. docs/knobs.md is made from docs/results/cpu/bench_knobs.jsonl, by scripts/pages/doc_tables.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowvram.config.registry import Option, all_options, knob_of, neutral_options
from lowvram.config.settings import settings
from lowvram.core.assemble import assemble
from lowvram.core.device import absent_facts, choose_device
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob
from lowvram.core.rig import Part
from lowvram.data.batch_sizes import SameSize
from lowvram.fidelity.worker import compared
from lowvram.loops.export.folder import load
from lowvram.loops.setup import open_data
from lowvram.results.row import Row, Status, to_json
from scripts.benchmarks.bench_knobs_report import Line, table
from scripts.benchmarks.runs import Runs
from scripts.pages.pairs import why_not

RATE = 1e4  # so that one step's difference of fp32 weights is the gradient and nothing else
ONE_STEP = ["mode=train", "train.steps=1", "optimizer=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0.0"]
TIMED = ["mode=measure", "measure.reruns=0", "measure.warmup_steps=2", "measure.steps=6", "measure.max_seconds=20"]
COMPANIONS = {Fact.MANY_RANKS: "sharding.ranks=2", Fact.COMPILED: "compile=blocks"}
CHOSEN = {
    ("ckpt", "auto"): "ckpt.blocks=[0,1]",  # by hand: a budget, on a CPU a limit of malloc's, costs time itself
    ("weights", "auto"): "weights.resident=2",
    ("sharding", "tensor"): "sharding.ranks=3",  # the Transformer has three heads
    ("sharding", "context"): "sharding.ranks=3",
    ("sharding", "pipeline"): "accum=x2",  # two stages take turns
}
FURTHER = {
    ("sharding", "fsdp"): [
        ("sharding.ranks=4",),
        ("sharding.ranks=4", "sharding.replicate=2"),
        ("sharding.ranks=4", "sharding.reshard_after_forward=2"),
    ],
    ("tile", "tokens"): [("tile.tokens=16",)],  # of the 128 of a sample
}
MODELS = (["model=transformer"], ["model=resnet", "model.norm=group"])
WITHOUT_ERROR = ("optimizer", "allocator", "adapter", "depth", "sparsity")  # another model or update, no other numbers
KEPT = ("peak_bytes", "process_peak_bytes", "by_kind", "by_kind_max")
BASELINE = ""


class Choice(NamedTuple):
    """What a row is of: an option, with other values of some fields."""

    group: str
    option: str
    fields: tuple[str, ...] = ()

    @property
    def knob(self) -> Knob:
        return knob_of((self.group, self.option))


@dataclass(frozen=True)
class Book:
    """The file of lines."""

    path: Path

    def lines(self, model: str) -> list[Line]:
        """Of one model under one set of overrides."""
        texts = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [line for line in map(json.loads, texts) if line["model"] == model]

    def add(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{to_json(line)}\n")


@dataclass(frozen=True)
class Bench:
    """One model under one set of overrides."""

    runs: Runs
    book: Book
    words: list[str]
    has_times: bool = True  # whether the machine does nothing else

    @property
    def model(self) -> str:
        return " ".join(self.words)

    def round(self, options: Sequence[Choice], number: int) -> None:
        """Measures what the book lacks of it, with a baseline before and after each two options."""
        known = {line["option"] for line in self.book.lines(self.model) if line.get("round") == number}
        missing = [option for option in options if name_of(option) not in known]
        before = self.kept(self.timed(None)) if missing else {}
        for start in range(0, len(missing), 2):
            pair = missing[start : start + 2]
            rows = [self.timed(option) for option in pair]
            after = self.kept(self.timed(None))
            for option, row in zip(pair, rows, strict=True):
                about = {"model": self.model, "option": name_of(option), "words": " ".join(words_of(option))}
                figures = {"round": number, "found": self.kept(row), "plain": [before, after], "machine": machine(row)}
                self.book.add({**about, **figures})
            before = after

    def gradients(self, options: Sequence[Choice]) -> None:
        """The errors that the book lacks."""
        known = {line["option"] for line in self.book.lines(self.model) if "gradient_error" in line}
        for option in (None, *(option for option in options if option.group not in WITHOUT_ERROR)):
            if name_of(option) not in known:
                error = self.gradient_error(option)
                self.book.add({"model": self.model, "option": name_of(option), "gradient_error": error})

    def kept(self, row: Row) -> dict[str, Any]:
        """What the table needs of a row."""
        memory = {key: row["memory"][key] for key in KEPT}
        step_ms = row["time"]["step_ms_p50"] if self.has_times else None
        return {"status": row["status"], "reason": row["reason"], "step_ms": step_ms, **memory}

    def timed(self, option: Choice | None) -> Row:
        return self.runs.run(name_of(option) or "baseline", [*TIMED, *self.words, *words_of(option)])

    def gradient_error(self, option: Choice | None) -> float | None:
        """Of the first step's gradients, relative to fp64 at the same weights."""
        row = self.runs.run(f"{name_of(option)}: gradients", [*ONE_STEP, *self.words, *words_of(option)])
        if row["status"] != Status.OK:
            return None
        before, wanted = in_double(row)
        after = dict(load(self.runs.folder / row["id"] / "model").named_parameters())
        found = {name: (before[name] - after[name].detach().double()) / RATE for name in wanted}
        return compared((found[name], wanted[name]) for name in wanted).gradient_error


def name_of(option: Choice | None) -> str:
    return BASELINE if option is None else " ".join((f"{option.group}={option.option}", *option.fields))


def words_of(option: Choice | None) -> list[str]:
    """The option, with what it needs beside it."""
    if option is None:
        return []
    chosen = CHOSEN.get((option.group, option.option))
    words = [f"{option.group}={option.option}", *([chosen] if chosen else []), *option.fields]
    given = {word.partition("=")[0] for word in words}
    beside = [word for fact, word in COMPANIONS.items() if fact in option.knob.needs()]
    return [*words, *(word for word in beside if word.partition("=")[0] not in given)]


def machine(row: Row) -> dict[str, Any]:
    return {key: row["provenance"][key] for key in ("device_name", "torch", "threads")}


def in_double(row: Row) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Initial weights and their gradients on the first batch in fp64, by name, on the CPU."""
    built = settings(row["config"])
    data, cpu = open_data(built), torch.device("cpu")
    problem = built.groups["task"].pose(built.groups["model"], data.spec)
    plain = {name: knob_of((name, option)) for name, option in neutral_options().items()}
    rig = assemble(problem, plain, cpu, built.root.seed)
    rig.model.double()
    batch = next(built.groups["loader"].batches(data.train, SameSize(built.train.batch_size), built.root.seed, 0, cpu))
    before = {name: parameter.detach().clone() for name, parameter in rig.model.named_parameters()}
    part = as_double(batch)
    loss = rig.criterion(rig.forward(part), part) / part.num_targets
    gradients = torch.autograd.grad(loss, list(rig.model.parameters()))
    return before, dict(zip(before, gradients, strict=True))


def as_double(batch: Part) -> Part:
    return replace(batch, inputs=batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs)


def is_one_of(names: Sequence[str], option: Option) -> bool:
    """Whether an option, or its group, is among the names; a neutral option is the baseline."""
    is_neutral = neutral_options()[option[0]] == option[1]
    return not is_neutral and (option[0] in names or "=".join(option) in names)


def choices_of(option: Option) -> list[Choice]:
    """The rows of an option."""
    return [Choice(*option, fields) for fields in ((), *FURTHER.get(option, ()))]


def main() -> None:
    given = sys.argv[1:]
    rounds = int(given.pop(0)) if given and given[0].isdigit() else 3
    own = {"only": ",".join(neutral_options()), "to": "outputs/bench_knobs.jsonl", "times": "yes"}
    own |= {key: value for key, _, value in (word.partition("=") for word in given) if key in own}
    words = [word for word in given if word.partition("=")[0] not in own]
    groups, book = own["only"].split(","), Book(Path(own["to"]))
    models = [words] if any(word.startswith("model=") for word in words) else [[*model, *words] for model in MODELS]
    absent = absent_facts(choose_device("auto"))
    options = [each for each in all_options() if is_one_of(groups, each)]
    missing = {option: why for option in options if (why := why_not([option], absent))}
    choices = [each for option in options if option not in missing for each in choices_of(option)]
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        benches = [Bench(runs, book, model, own["times"] != "no") for model in models]
        for number in range(1, rounds + 1):
            for bench in benches:
                print(f"{bench.model}: round {number} of {rounds}", file=sys.stderr)
                bench.round(choices, number)
                bench.gradients(choices)
    for bench in benches:
        print(f"`{bench.model}`\n", *table(book.lines(bench.model)), "", sep="\n")
    for option, why in missing.items():
        print(f"- `{'='.join(option)}`{why[0].removeprefix('='.join(option))}")


if __name__ == "__main__":
    main()
