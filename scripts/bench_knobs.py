"""What each knob saves, costs in speed and costs in accuracy: one option at a time against the baseline.

    scripts/python scripts/bench_knobs.py [rounds] [only=GROUP,GROUP] [overrides]
    scripts/python scripts/bench_knobs.py 3 only=logits model=gpt2 data=synthetic train.batch_size=4 data.eval_samples=1

Points of the command line, each in a fresh process. Every round goes through all options, with a baseline before and
after each two of them; an option's step time is divided by the mean of the baselines around it, and the table has the
median over rounds with its range. Bytes are of the last round (they repeat). The gradient error is relative to fp64 at
the same weights: one plain SGD step of a large rate, read off the saved weights. Runs on the CPU and on CUDA; options
that the machine can't have are named with the reason.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowvram.core.device import absent_facts, choose_device
from lowvram.core.knob import Fact
from lowvram.core.rig import Part, assemble
from lowvram.export import load
from lowvram.job import open_data
from lowvram.modes.fidelity import compared
from lowvram.options import Option, all_options, knob_of, neutral_options, why_not
from lowvram.results.row import Row
from lowvram.runs import Runs
from lowvram.settings import settings

HEAD = """| option | peak | saves | other | process growth | time | gradient error |
|---|---:|---|---:|---:|---:|---:|"""
MIB = 2**20
ONLY = "only="
RATE = 1e4  # so that one step's difference of fp32 weights is the gradient and nothing else
ONE_STEP = ["mode=train", "train.steps=1", "optimizer=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0.0"]
TIMED = ["mode=measure", "measure.reruns=0", "measure.warmup_steps=2", "measure.steps=6", "measure.max_seconds=20"]
COMPANIONS = {Fact.MANY_RANKS: "sharding.ranks=2", Fact.COMPILED: "compile=blocks"}
MODELS = (["model=transformer"], ["model=resnet", "model.norm=group"])


class Seen(NamedTuple):
    """An option, and the baselines before and after it."""

    found: Row
    plain: tuple[Row, Row]

    @property
    def time_ratio(self) -> float:
        return step_ms(self.found) / statistics.mean(map(step_ms, self.plain))


@dataclass(frozen=True)
class Bench:
    """One model under one set of overrides."""

    runs: Runs
    words: list[str]

    def table(self, options: list[Option], rounds: int) -> Iterator[str]:
        """A row for the baseline, then one for each option."""
        seen: dict[Option, list[Seen]] = {option: [] for option in options}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for option, one in self.round(options):
                seen[option].append(one)
        yield f"| baseline | | | | | 1 | {self.gradient_error(None):.1e} |"
        yield from (self.line(option, seen[option]) for option in options)

    def round(self, options: list[Option]) -> Iterator[tuple[Option, Seen]]:
        before = self.timed(None)
        for start in range(0, len(options), 2):
            pair = options[start : start + 2]
            rows = [self.timed(option) for option in pair]
            after = self.timed(None)
            yield from ((option, Seen(row, (before, after))) for option, row in zip(pair, rows, strict=True))
            before = after

    def line(self, option: Option, seen: list[Seen]) -> str:
        last, name = seen[-1], " ".join(words_of(option))
        if last.found["status"] != "ok":
            return f"| `{name}` | {last.found['status']}: {last.found['reason']} |"
        ratios = [one.time_ratio for one in seen]
        error = "–" if option[0] in ("optimizer", "allocator", "adapter") else f"{self.gradient_error(option):.1e}"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        return f"| `{name}` | {memory(option, last.found, last.plain[0])} | {spread} | {error} |"

    def timed(self, option: Option | None) -> Row:
        return self.runs.run(name_of(option), [*TIMED, *self.words, *words_of(option)])

    def gradient_error(self, option: Option | None) -> float:
        """Of the first step's gradients, relative to fp64 at the same weights."""
        row = self.runs.run(f"{name_of(option)}: gradients", [*ONE_STEP, *self.words, *words_of(option)])
        if row["status"] != "ok":
            return float("nan")
        before, wanted = in_double(row)
        after = dict(load(self.runs.folder / row["id"] / "model").named_parameters())
        found = {name: (before[name] - after[name].detach().double()) / RATE for name in wanted}
        error = compared((found[name], wanted[name]) for name in wanted).gradient_error
        return float("nan") if error is None else error


def name_of(option: Option | None) -> str:
    return "=".join(option or ("baseline",))


def words_of(option: Option | None) -> list[str]:
    """The option, with what it needs beside it."""
    if option is None:
        return []
    needs = knob_of(option).needs()
    return ["=".join(option), *(word for fact, word in COMPANIONS.items() if fact in needs)]


def step_ms(row: Row) -> float:
    return row["time"]["step_ms_p50"]


def memory(option: Option, found: Row, plain: Row) -> str:
    """Peak; the kind that the option saves; other's share of the peak; growth of the process."""
    growth = f"{ratio(found, plain, 'process_peak_bytes')}"
    if found["memory"]["by_kind_max"] is None:
        return f"– | – | – | {growth}"
    kind = knob_of(option).saves
    saved = f"{kind.value} {of_kind(plain, kind.value)} → {of_kind(found, kind.value)}" if kind else "–"
    other = found["memory"]["by_kind"]["other"] / found["memory"]["peak_bytes"]
    return f"{ratio(found, plain, 'peak_bytes')} | {saved} | {other:.1%} | {growth}"


def of_kind(row: Row, kind: str) -> str:
    return f"{row['memory']['by_kind_max'][kind] / MIB:.1f}"


def ratio(found: Row, plain: Row, name: str) -> str:
    one, other = found["memory"][name], plain["memory"][name]
    return f"{other / MIB:.1f} → {one / MIB:.1f} ({one / other - 1:+.0%})"


def in_double(row: Row) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Initial weights and their gradients on the first batch in fp64, by name, on the CPU."""
    built = settings(row["config"])
    data, cpu = open_data(built), torch.device("cpu")
    problem = built.groups["task"].pose(built.groups["model"], data.spec)
    plain = {name: knob_of((name, option)) for name, option in neutral_options().items()}
    rig = assemble(problem, plain, cpu, built.root.seed)
    rig.model.double()
    batch = next(built.groups["loader"].batches(data.train, built.train.batch_size, built.root.seed, 0, cpu))
    before = {name: parameter.detach().clone() for name, parameter in rig.model.named_parameters()}
    part = as_double(batch)
    loss = rig.criterion(rig.forward(part), part) / part.num_targets
    gradients = torch.autograd.grad(loss, list(rig.model.parameters()))
    return before, dict(zip(before, gradients, strict=True))


def as_double(batch: Part) -> Part:
    return replace(batch, inputs=batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs)


def main() -> None:
    given = sys.argv[1:]
    rounds = int(given.pop(0)) if given and given[0].isdigit() else 3
    groups = given.pop(0)[len(ONLY) :].split(",") if given and given[0].startswith(ONLY) else list(neutral_options())
    is_model = any(word.startswith("model=") for word in given)
    device = choose_device("auto")
    absent = absent_facts(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, {rounds} rounds; MiB\n")
    options = [each for each in all_options() if each[0] in groups and each[1] != neutral_options()[each[0]]]
    missing = {option: why for option in options if (why := why_not([option], absent))}
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        for model in [[]] if is_model else MODELS:
            words = [*model, *given]
            print(f"`{' '.join(words)}`\n\n{HEAD}")
            for line in Bench(runs, words).table([option for option in options if option not in missing], rounds):
                print(line, flush=True)
            print()
    for option, why in missing.items():
        print(f"- `{'='.join(option)}`{why[0].removeprefix('='.join(option))}")


if __name__ == "__main__":
    main()
