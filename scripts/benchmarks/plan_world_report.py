"""The page docs/plans_against_the_world.md. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

Plan = Mapping[str, Any]
MIB = 2**20
OURS = "lowvram"
OTHERS = {"xMem": "xmem_bytes", "DNNMem": "dnnmem_bytes", "SchedTune": "schedtune_bytes", "LLMem": "llmem_bytes"}
INTRO = """# Plans against the world

What lowvram plans, beside what other people measured on cards that we have never seen, and beside what other tools
estimated for the same runs. `scripts/benchmarks/plan_world.py` makes this page from committed rows, without a GPU. No
number in the program is fitted to these peaks. Two things in it come from these runs all the same: the range of the
CUDA context, which the peaks leave out, begins with what xMem saw on an RTX 3060; and that the allocator gives memory
back where a card has no more was mended when a row showed that plans didn't know it.

## xMem's runs

[xMem](https://github.com/Stone-ResearchLife/xMem) (arXiv 2510.21048, data under the MIT licence) publishes the peaks of
training runs on an RTX 3060, an RTX 4060 and an A100 (torch 2.6, CUDA 12.4, fp32, four steps of a plain loop): image
models of torchvision with images of 86 × 86 pixels, language models of transformers with texts of 128 tokens. The
peak is that of the process, less what it held when the CUDA context was there. It publishes its own estimates and those
of three other tools beside them; xMem first runs each job on a CPU and reads the profile, lowvram plans from the
configuration. These are {num_runs} of their rows.

Planned is `reserved_bytes` of `lowvram.plan(…, loop="plain", zero_grad=…)`, with torch's own optimizers. Where a row
doesn't say where its loop zeroes gradients, that is just before the backward pass, the default of their trainer.
"""
OUT = """
{num_out} of the runs ran out of memory. lowvram plans for {ours} of them that they don't fit; xMem estimated more than
the card has for {theirs}. Of the {num_ran} that ran, lowvram plans for {ours_wrong} that they don't fit.
"""
WHY = """
## What plans leave out

- **Workspaces of cuDNN**: they depend on the algorithm that cuDNN chooses, come and go, and give way where memory is
  short. VGG19, MobileNetV2 and MnasNet took 0.5 to 1.3 GB more than planned in some runs, and not in others.
- **Code of kernels**: CUDA loads it when a kernel first runs, in these figures up to some 90 MiB; plans count it in the
  context.
- **Versions**: plans are of the installed torch and transformers, the runs of torch 2.6.
- Configurations that xMem ran twice differ by 0.5 to 4.2 %.
"""


@dataclass(frozen=True)
class Run:
    """A row of xmem.csv."""

    row: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.row[name]

    @property
    def key(self) -> str:
        names = ("frame", "model", "optimizer", "batch", "zero_grad_mode", "card")
        return " ".join(self.row[name] for name in names)

    @property
    def is_out(self) -> bool:
        """Whether it ran out of memory."""
        return self.row["real_oom"] == "1"

    def number(self, name: str) -> int | None:
        """None: the tool gave no estimate."""
        text = self.row[name]
        return int(text) if text and int(text) > 0 else None


@dataclass(frozen=True)
class WorldReport:
    """Planned beside measured.

    Args:
        plans: by the key of a run.
    """

    runs: Sequence[Run]
    plans: Mapping[str, Plan]

    def lines(self) -> Iterator[str]:
        yield from INTRO.format(num_runs=len(self.runs)).splitlines()
        yield from ["", *self.summary()]
        yield from OUT.format(**self.verdicts()).splitlines()
        yield from ["", *self.table()]
        yield from WHY.splitlines()

    def ran(self) -> list[Run]:
        return [run for run in self.runs if not run.is_out]

    def planned(self, run: Run) -> int | None:
        return self.plans[run.key].get("reserved_bytes")

    def is_refused(self, run: Run) -> bool:
        """Whether the plan needs more than the card has."""
        needed = self.plans[run.key].get("least_vram_bytes")
        return needed is not None and needed > int(run["card_bytes"])

    def summary(self) -> list[str]:
        tools: dict[str, Callable[[Run], int | None]] = {OURS: self.planned}
        tools |= {name: lambda run, column=column: run.number(column) for name, column in OTHERS.items()}
        head = ["| errors of runs that ran | runs | median | 90 % below | largest | signed median | too small |"]
        head += ["|---|---:|---:|---:|---:|---:|---:|"]
        return [*head, *(self.errors(name, of) for name, of in tools.items())]

    def errors(self, name: str, of: Callable[[Run], int | None]) -> str:
        pairs = [(of(run), run.number("nvml_bytes")) for run in self.ran()]
        errors = [estimate / taken - 1 for estimate, taken in pairs if estimate and taken]
        sizes = sorted(map(abs, errors))
        most = sizes[ceil(0.9 * len(sizes)) - 1]
        too_small = sum(error < 0 for error in errors) / len(errors)
        figures = f"{median(sizes):.1%} | {most:.1%} | {sizes[-1]:.1%} | {median(errors):+.1%} | {too_small:.0%}"
        return f"| {name} | {len(errors)} | {figures} |"

    def verdicts(self) -> dict[str, int]:
        out = [run for run in self.runs if run.is_out]
        return {
            "num_out": len(out),
            "ours": sum(map(self.is_refused, out)),
            "theirs": sum((run.number("xmem_bytes") or 0) > int(run["card_bytes"]) for run in out),
            "num_ran": len(self.ran()),
            "ours_wrong": sum(map(self.is_refused, self.ran())),
        }

    def table(self) -> list[str]:
        """A row for each run that ran, the largest error first."""
        head = ["| model | optimizer | batch | card | taken MiB | planned | error | xMem | DNNMem |"]
        head += ["|---|---|---:|---|---:|---:|---:|---:|---:|"]
        return [
            *head,
            *map(self.line, sorted(self.ran(), key=lambda run: -abs(self.error(run, self.planned(run)) or 9))),
        ]

    def error(self, run: Run, estimate: int | None) -> float | None:
        return None if estimate is None else estimate / int(run["nvml_bytes"]) - 1

    def line(self, run: Run) -> str:
        planned, taken = self.planned(run), int(run["nvml_bytes"])
        errors = [self.error(run, each) for each in (planned, run.number("xmem_bytes"), run.number("dnnmem_bytes"))]
        told = ["–" if error is None else f"{error:+.1%}" for error in errors]
        size = "–" if planned is None else f"{planned / MIB:,.0f}"
        about = f"{run['model']} | {run['optimizer']} | {run['batch']} | {run['card'].upper()}"
        return f"| {about} | {taken / MIB:,.0f} | {size} | {' | '.join(told)} |"
