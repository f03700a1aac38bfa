"""Our fine-tuning step against that of Hugging Face's Trainer: same weights, samples, order, precision and optimizer.

    taskset -c 1 env OMP_NUM_THREADS=1 scripts/python scripts/benchmarks/bench_trainer.py outputs/bench_trainer [rounds]

Each measurement is a fresh process: the command line with process=inline, or a Trainer in its plain loop (nothing
logged, saved or evaluated, no workers, its own fused AdamW). Both of a round run side by side and share the core in
turns of milliseconds: what a shared machine does to one it does to both. The time is that of the second half of the
steps, everything between them included: seconds of the processor that the process took. malloc is as it comes to each:
ours sets its thresholds (lowvram/knobs/allocator.py), the Trainer leaves to chance how often it gives pages back and
takes them again; one case has it keep them for both. The losses come from runs of their own. Finished measurements in
the folder are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lowvram.config.identity import device_name
from scripts.benchmarks.contestants import KEPT, Case, apart, make_model, perform, shown, timed
from scripts.benchmarks.peers import CONTESTANTS

BOTH = ("ours", "trainer")
GPT2 = {"vocab_size": 1024, "n_positions": 128, "n_embd": 192, "n_layer": 4, "n_head": 4}
TINY = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
BERT = {
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_labels": 64,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = ("data=python_source", "task=language_modelling")
CLASSES = ("data=python_packages", "task=classification")
SMALL = ("train.batch_size=4", "data.sequence_length=32", "stepping.clip=1.0")
USUAL = ("train.batch_size=8", "data.sequence_length=128", "stepping.clip=1.0")
CASES = (
    Case("GPT-2, fp32", "gpt2", "causal_lm", GPT2 | NO_DROPOUT, (*TEXT, *USUAL), 12),
    Case(
        "GPT-2, fp32, freed memory kept", "gpt2", "causal_lm", GPT2 | NO_DROPOUT, (*TEXT, *USUAL), 12, environment=KEPT
    ),
    Case("BERT, fp32", "bert", "sequence_classification", BERT | NO_BERT_DROPOUT, (*CLASSES, *USUAL), 12),
    Case("tiny GPT-2, fp32", "gpt2", "causal_lm", TINY | NO_DROPOUT, (*TEXT, *SMALL), 200),
)


def largest_difference(case: Case, folder: Path) -> float:
    """Of the losses of the first steps."""
    each = [told["losses"] for told in apart(__file__, BOTH, case, folder, case.history_steps, 1)]
    return max(abs(one - other) for one, other in zip(*each, strict=True))


def measured(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """One line of the results."""
    make_model(case, folder)
    line: dict[str, Any] = {"case": case.name, "ours": [], "trainer": []}
    for _ in range(rounds):
        for contestant, found in timed(__file__, BOTH, case, folder):
            line[contestant].append(found.samples_per_s)
    return {**line, "loss_difference": largest_difference(case, folder), "loss_steps": case.history_steps}


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A page of Markdown."""
    import torch
    import transformers

    yield "# Our fine-tuning step beside that of Hugging Face's Trainer\n"
    where = f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    command = "taskset -c 1 env OMP_NUM_THREADS=1 scripts/python scripts/benchmarks/bench_trainer.py FOLDER"
    yield f"`{command}`: {where}. One thread on"
    yield "one core, and seconds are those that a process itself took of it. malloc is as it comes to each, but where"
    yield "freed memory is kept for both. Medians over rounds (least to most), each process fresh, both side by side;"
    yield "the ratio is that in a round.\n"
    yield "| case | samples/s, ours | samples/s, Trainer | ours / Trainer | largest difference of a loss |"
    yield "|---|---:|---:|---:|---:|"
    for line in lines:
        ratios = [one / other for one, other in zip(line["ours"], line["trainer"], strict=True)]
        cells = [shown(line["ours"]), shown(line["trainer"]), shown(ratios, 3)]
        cells += [f"{line['loss_difference']:.1e} in {line['loss_steps']} steps"]
        yield f"| {line['case']}, {len(ratios)} rounds | {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1] == "--perform":
        perform(CONTESTANTS, CASES, sys.argv[2:])
        return
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "bench_trainer.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for case in CASES:
        if case.name not in {line["case"] for line in lines}:
            lines.append(measured(case, folder, int(sys.argv[2]) if len(sys.argv) > 2 else 6))
            kept.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            print(list(report(lines[-1:]))[-1], flush=True)
    (folder / "bench_trainer.md").write_text("\n".join(report(lines)) + "\n")


if __name__ == "__main__":
    main()
