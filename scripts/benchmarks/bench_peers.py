"""Our command line beside a loop written by hand, Hugging Face's Trainer and Lightning's: peak memory and speed.

    scripts/python scripts/benchmarks/bench_peers.py [full|scaled] [rounds=4] [savings=bf16,checkpointing,…] [words]

The same model (random weights of a GPT-2 of transformers), samples, order, logical batch, precision and optimizer;
twice: plainly in fp32, and with all that everyone offers to save memory: autocast to bf16, checkpointing, AdamW of
8 bits, parts of one sample. full: GPT-2 medium at 32 x 1,024, for one CUDA device; scaled: four layers at 8 x 128 on a
CPU, where `savings=checkpointing,8bit,micro1` leaves out what it has no products for. Words are train.py's, for ours
alone, such as stepping=in_backward.

Each measurement is a fresh process. On a CPU the four of a round run side by side: best on one core of their own, which
they share in turns of milliseconds, so that what a shared machine does to one it does to all. On a card they run one
after another, in every other round in the other order. Time is that of the second half of the steps: on a CPU what the
process took of the processor, on a card the clock's. The peak is the card's allocator's, or by how much the process
grew. What was measured is kept in outputs/bench_peers; the results go to docs/results/DEVICE/. Needs
`pip install 'lowvram[bench]'`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

from lowvram.config.identity import ROOT, device_name
from scripts.benchmarks.bench_headline import results_folder
from scripts.benchmarks.contestants import (
    BF16,
    CHECKPOINTING,
    EIGHT_BITS,
    ONE_BY_ONE,
    Case,
    make_model,
    perform,
    shown,
    timed,
)
from scripts.benchmarks.peers import CONTESTANTS

FOLDER = ROOT / "outputs" / "bench_peers"
NAMES = {"ours": "ours", "by_hand": "by hand", "trainer": "Hugging Face Trainer", "lightning": "Lightning"}
ALL = (BF16, CHECKPOINTING, EIGHT_BITS, ONE_BY_ONE)
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
TEXT = ("data=python_source", "task=language_modelling", "stepping.clip=1.0")
SIZES = {
    "full": (
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16},
        ("train.batch_size=32", "data.sequence_length=1024"),
        {"num_steps": 6, "device": "cuda"},
    ),
    "scaled": (
        {"vocab_size": 1024, "n_positions": 128, "n_embd": 192, "n_layer": 4, "n_head": 4},
        ("train.batch_size=8", "data.sequence_length=128"),
        {"num_steps": 25, "device": "cpu"},
    ),
}
Line = dict[str, Any]


def cases_of(arguments: Sequence[str]) -> list[Case]:
    """Plainly, and with all savings."""
    size = next((word for word in arguments if word in SIZES), "full")
    savings = option(arguments, "savings", ",".join(ALL)).split(",")
    for name in savings:
        if name not in ALL:
            sys.exit(f"savings={name}: must be some of {', '.join(ALL)}")
    sizes, words, about = SIZES[size]
    more = [word for word in arguments if word.partition("=")[0] not in ("rounds", "savings") and word not in SIZES]
    plain = Case(f"{size}, plain", "gpt2", "causal_lm", sizes | NO_DROPOUT, (*TEXT, *words), **about)
    saving = Case(
        f"{size}, {', '.join(savings)}",
        *("gpt2", "causal_lm", sizes | NO_DROPOUT, (*TEXT, *words, *more)),
        savings=frozenset(savings),
        **about,
    )
    return [plain, saving]


def option(arguments: Sequence[str], name: str, default: str) -> str:
    return next((word.partition("=")[2] for word in arguments if word.startswith(f"{name}=")), default)


def measured(case: Case, lines: list[Line], rounds: int) -> Iterator[Line]:
    """The lines that are missing: one of each contestant in each round."""
    known = {(line["case"], line["round"], line["contestant"]) for line in lines}
    for number in range(rounds):
        names = list(NAMES)[:: -1 if number % 2 else 1]
        missing = [name for name in names if (case.name, number, name) not in known]
        for name, (samples_per_s, peak_bytes) in timed(__file__, missing, case, FOLDER, sys.argv[1:]).items():
            about = {"case": case.name, "round": number, "contestant": name}
            yield {**about, "samples_per_s": samples_per_s, "peak_bytes": peak_bytes}


def page(cases: Sequence[Case], lines: Sequence[Line]) -> Iterator[str]:
    """Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning"))
    yield "# Our command line beside its peers\n"
    command = shlex.join(["scripts/benchmarks/bench_peers.py", *sys.argv[1:]])
    yield f"Made by `{command}` on {device_name()}, {versions}."
    yield "Medians over rounds (least to most); ratios are medians of those in a round. Each runs in a process of"
    yield "its own, on a CPU side by side with the others."
    for case in cases:
        found = {name: values_of(case, name, lines) for name in NAMES}
        words = [word for word in case.overrides(FOLDER) if not word.startswith("model.name=")]
        yield f"\n## {case.name}\n\nOurs: `{shlex.join(['python', 'train.py', *words])} model.name=…`\n"
        yield "| contestant | samples/s | ours over it | peak MiB | ours over it |\n|---|---:|---:|---:|---:|"
        for name, (speeds, peaks) in found.items():
            faster, smaller = (ratios(*pair) for pair in zip(found["ours"], (speeds, peaks), strict=True))
            peak = shown([peak_bytes / 2**20 for peak_bytes in peaks], 0)
            yield f"| {NAMES[name]} | {shown(speeds)} | {faster} | {peak} | {smaller} |"


def values_of(case: Case, contestant: str, lines: Sequence[Line]) -> tuple[list[float], list[float]]:
    """Samples per second and peaks, round by round."""
    own = [line for line in lines if (line["case"], line["contestant"]) == (case.name, contestant)]
    own.sort(key=lambda line: line["round"])
    return [line["samples_per_s"] for line in own], [line["peak_bytes"] for line in own]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{median(one / other for one, other in zip(ours, theirs, strict=True)):.3f}"


def main() -> None:
    if "--perform" in sys.argv:
        arguments, words = sys.argv[1 : sys.argv.index("--perform")], sys.argv[sys.argv.index("--perform") + 1 :]
        perform(CONTESTANTS, cases_of(arguments), words)
        return
    cases, rounds = cases_of(sys.argv[1:]), int(option(sys.argv, "rounds", "4"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "bench_peers.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for case in cases:
        make_model(case, FOLDER)
        for line in measured(case, lines, rounds):
            lines.append(line)
            kept.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
            print(line, flush=True)
    results_folder().mkdir(parents=True, exist_ok=True)
    names = {case.name for case in cases}
    own = [line for line in lines if line["case"] in names and line["round"] < rounds]
    (results_folder() / "bench_peers.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in own))
    (results_folder() / "bench_peers.md").write_text("\n".join(page(cases, own)) + "\n")


if __name__ == "__main__":
    main()
