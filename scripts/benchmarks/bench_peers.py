"""Our command line beside a loop written by hand, Hugging Face's Trainer and Lightning's: peak memory and speed.

    scripts/python scripts/benchmarks/bench_peers.py [full|scaled] [rounds=4] [savings=bf16,checkpointing,…] [words]
    EMULATED_CARD=h100 EMULATED_VALUES_MAX=1048576 scripts/emulated_gpu python scripts/benchmarks/bench_peers.py full

The same model (random weights of a GPT-2 of transformers), samples, order, logical batch, precision and optimizer:
plainly in fp32; with all that everyone offers to save memory: autocast to bf16, checkpointing, AdamW of 8 bits, parts
of one sample; and as small as it gets: weights in bf16, and AdamW of 4 bits or Adafactor. full: GPT-2 medium at 32 x
1,024, for one CUDA device; scaled: four layers at 8 x 128 on a CPU, where `savings=checkpointing,8bit,micro1` leaves
out what it has no products for, and where the smallest are left out. MORE has the words of train.py that only we have:
each is another line of ours. Words on the command line are for ours alone, too, and replace those of MORE.

Each measurement is a fresh process. On a CPU the four of a round run side by side: best on one core of their own, which
they share in turns of milliseconds, so that what a shared machine does to one it does to all. On a card they run one
after another, in every other round in the other order. Time is that of the second half of the steps: on a CPU what the
process took of the processor, on a card the clock's. The peak is the card's allocator's, or by how much the process
grew. An emulated card (tests/emulated_cuda) has memory and no speed: one round of two steps, and nothing plain. What
was measured is kept in outputs/bench_peers (or bench_peers_emulated); the results go to docs/results/DEVICE/. Needs
`pip install 'lowvram[bench]'`, which is in .venv-cuda already.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from lowvram.config.identity import ROOT, device_name
from scripts.benchmarks.bench_headline import EMULATED, results_folder
from scripts.benchmarks.contestants import (
    ADAFACTOR,
    BF16,
    BF16_WEIGHTS,
    CHECKPOINTING,
    EIGHT_BITS,
    FOUR_BITS,
    ONE_BY_ONE,
    Case,
    Contestant,
    Told,
    make_model,
    ours,
    perform,
    shown,
    timed,
)
from scripts.benchmarks.peers import CONTESTANTS

FOLDER = ROOT / "outputs" / ("bench_peers_emulated" if EMULATED else "bench_peers")
OURS = "ours"
NAMES = {OURS: "ours", "by_hand": "by hand", "trainer": "Hugging Face Trainer", "lightning": "Lightning"}
ALL = (BF16, CHECKPOINTING, EIGHT_BITS, ONE_BY_ONE)
SMALLEST = ((BF16_WEIGHTS, CHECKPOINTING, FOUR_BITS, ONE_BY_ONE), (BF16_WEIGHTS, CHECKPOINTING, ADAFACTOR, ONE_BY_ONE))
TILED = "logits=tiled logits.chunk_tokens=128"
SUMS_IN_8_BITS = f"stepping=in_backward stepping.sums=int8 {TILED}"
# By a case's savings: further lines of ours, with words that the others have nothing like.
MORE: Mapping[Sequence[str], Mapping[str, str]] = {
    ALL: {
        "gradients summed on the host": f"accum=x8 tile=blocks stepping=in_backward {TILED}",
        "and inputs of blocks on the host": f"accum=x4 tile=blocks stepping=in_backward {TILED} "
        "offload=activations offload.in_flight=1",
    },
    SMALLEST[0]: {"sums in 8 bits": SUMS_IN_8_BITS},
    SMALLEST[1]: {"sums in 8 bits": SUMS_IN_8_BITS},
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
TEXT = ("data=python_source", "task=language_modelling", "stepping.clip=1.0")
SIZES = {
    "full": (
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16},
        ("train.batch_size=32", "data.sequence_length=1024"),
        {"num_steps": 1 if EMULATED else 6, "device": "cuda"},
    ),
    "scaled": (
        {"vocab_size": 1024, "n_positions": 128, "n_embd": 192, "n_layer": 4, "n_head": 4},
        ("train.batch_size=8", "data.sequence_length=128"),
        {"num_steps": 25, "device": "cpu"},
    ),
}
Line = dict[str, Any]


def cases_of(arguments: Sequence[str]) -> list[Case]:
    """Plainly (which on an emulated card would take much of the host's memory), with all savings, and on a card as
    small as it gets."""
    size = size_of(arguments)
    chosen = tuple(option(arguments, "savings", ",".join(ALL)).split(","))
    for name in chosen:
        if name not in ALL:
            sys.exit(f"savings={name}: must be some of {', '.join(ALL)}")
    sizes, words, about = SIZES[size]
    return [
        Case(
            f"{size}, {', '.join(savings) or 'plain'}",
            *("gpt2", "causal_lm", sizes | NO_DROPOUT, (*TEXT, *words)),
            savings=frozenset(savings),
            **about,
        )
        for savings in (*([] if EMULATED else [()]), chosen, *(SMALLEST if size == "full" else ()))
    ]


def size_of(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if word in SIZES), "full")


def option(arguments: Sequence[str], name: str, default: str) -> str:
    return next((word.partition("=")[2] for word in arguments if word.startswith(f"{name}=")), default)


def lines_of_ours(case: Case, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The words that each further line of ours adds to the first, by its name."""
    given = [word for word in arguments if word.partition("=")[0] not in ("rounds", "savings") and word not in SIZES]
    if not case.savings:
        return {}
    if given:
        return {f"{OURS}, with {' '.join(given)}": given}
    found = next((more for savings, more in MORE.items() if case.savings == frozenset(savings)), {})
    return {f"{OURS}, {name}": words.split() for name, words in found.items()} if size_of(arguments) == "full" else {}


def contestants_of(case: Case, arguments: Sequence[str]) -> dict[str, Contestant]:
    """All who train this case, by their names."""
    more = {name: partial(ours_with, words) for name, words in lines_of_ours(case, arguments).items()}
    return {OURS: ours, **more, **{name: each for name, each in CONTESTANTS.items() if name != OURS}}


def ours_with(words: Sequence[str], case: Case, folder: Path, num_steps: int, log_every: int) -> Told:
    return ours(with_words(case, words), folder, num_steps, log_every)


def with_words(case: Case, words: Sequence[str]) -> Case:
    """With more words for us; of two that say something of one key the last one counts."""
    return replace(case, words=(*case.words, *words))


def measured(case: Case, lines: list[Line], rounds: int, arguments: Sequence[str]) -> Iterator[Line]:
    """The lines that are missing: one of each contestant in each round."""
    known = {(line["case"], line["round"], line["contestant"]) for line in lines}
    for number in range(rounds):
        names = list(contestants_of(case, arguments))[:: -1 if number % 2 else 1]
        missing = [name for name in names if (case.name, number, name) not in known]
        for name, found in timed(__file__, missing, case, FOLDER, arguments):
            about = {"case": case.name, "round": number, "contestant": name}
            yield {**about, **found._asdict()} | ({"samples_per_s": None} if EMULATED else {})


def page(cases: Sequence[Case], lines: Sequence[Line], arguments: Sequence[str]) -> Iterator[str]:
    """Markdown."""
    yield "# Our command line beside its peers\n"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning"))
    command = shlex.join(["scripts/benchmarks/bench_peers.py", *arguments])
    yield f"Made by `{command}` on {'an emulated card' if EMULATED else device_name()}, {versions}."
    if EMULATED:
        yield "It shows memory alone, as torch's own allocator counts it. Each line is a process of its"
        yield "own and its peaks are those of two steps: the second one begins with all of the optimizer's state."
    else:
        yield "Medians over rounds (least to most); ratios are medians of those in a round. Each runs in a process of"
        yield "its own, on a CPU side by side with the others."
    for case in cases:
        yield from (memory_lines if EMULATED else speed_lines)(case, lines, arguments)


def title(case: Case, words: Sequence[str]) -> str:
    words = [word for word in with_words(case, words).overrides(FOLDER) if not word.startswith("model.name=")]
    return f"`{shlex.join(['python', 'train.py', *words])} model.name=…`"


def speed_lines(case: Case, lines: Sequence[Line], arguments: Sequence[str]) -> Iterator[str]:
    names = list(contestants_of(case, arguments))
    speeds = {name: values_of(case, name, lines, "samples_per_s") for name in names}
    peaks = {name: values_of(case, name, lines, "peak_bytes") for name in names}
    yield f"\n## {case.name}\n\nOurs: {title(case, ())}\n"
    yield "| contestant | samples/s | ours over it | peak MiB | ours over it |\n|---|---:|---:|---:|---:|"
    for name in names:
        faster, smaller = ratios(speeds[OURS], speeds[name]), ratios(peaks[OURS], peaks[name])
        peak = shown([peak_bytes / 2**20 for peak_bytes in peaks[name]], 0)
        yield f"| {NAMES.get(name, name)} | {shown(speeds[name])} | {faster} | {peak} | {smaller} |"


def memory_lines(case: Case, lines: Sequence[Line], arguments: Sequence[str]) -> Iterator[str]:
    """Peaks, and what each is of the Trainer's."""
    more = lines_of_ours(case, arguments)
    yield f"\n## {case.name}\n\nOurs: {title(case, ())}\n"
    for name, words in more.items():
        yield f"- {name}: also `{' '.join(words)}`"
    yield "\n| contestant | allocated MiB | of the Trainer's | reserved MiB | of the Trainer's |"
    yield "|---|---:|---:|---:|---:|"
    trainers = {field: values_of(case, "trainer", lines, field) for field in ("peak_bytes", "reserved_bytes")}
    for name in contestants_of(case, arguments):
        cells = [NAMES.get(name, name)]
        for field, of_trainer in trainers.items():
            own = values_of(case, name, lines, field)
            cells += [f"{median(own) / 2**20:,.0f}", ratios(own, of_trainer)]
        yield f"| {' | '.join(cells)} |"


def values_of(case: Case, contestant: str, lines: Sequence[Line], field: str) -> list[float]:
    """Round by round."""
    own = [line for line in lines if (line["case"], line["contestant"]) == (case.name, contestant)]
    return [line[field] for line in sorted(own, key=lambda line: line["round"])]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{median(one / other for one, other in zip(ours, theirs, strict=True)):.3f}"


def main() -> None:
    if "--perform" in sys.argv:
        arguments, words = sys.argv[1 : sys.argv.index("--perform")], sys.argv[sys.argv.index("--perform") + 1 :]
        cases = cases_of(arguments)
        (case,) = (case for case in cases if case.name == words[2])
        perform(contestants_of(case, arguments), cases, words)
        return
    arguments = sys.argv[1:]
    cases, rounds = cases_of(arguments), int(option(arguments, "rounds", "1" if EMULATED else "4"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "bench_peers.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for case in cases:
        make_model(case, FOLDER)
        for line in measured(case, lines, rounds, arguments):
            lines.append(line)
            kept.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
            print(line, flush=True)
    results_folder().mkdir(parents=True, exist_ok=True)
    wanted = {(case.name, name) for case in cases for name in contestants_of(case, arguments)}
    own = [line for line in lines if (line["case"], line["contestant"]) in wanted and line["round"] < rounds]
    (results_folder() / "bench_peers.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in own))
    (results_folder() / "bench_peers.md").write_text("\n".join(page(cases, own, arguments)) + "\n")


if __name__ == "__main__":
    main()
