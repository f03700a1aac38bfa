"""Our fine-tuning step against that of Hugging Face's Trainer: same weights, samples, order, precision and optimizer.

    taskset -c 1 env OMP_NUM_THREADS=1 scripts/python scripts/bench_trainer.py outputs/bench_trainer [rounds]

Each measurement is a fresh process: the command line with process=inline, or a Trainer in its plain loop (nothing
logged, saved or evaluated, no workers, its own fused AdamW). Rounds go ours, Trainer, Trainer, ours. The time is that
of the second half of the steps, everything between them included: seconds of the processor, of which others on a shared
machine take none. The C library keeps freed memory for both (`MALLOC`): how often it gives pages back and takes them
again is chance, and worth some 8 %. The losses come from runs of their own. Finished measurements in the folder are
kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from lowvram.identity import ROOT, device_name

MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
CONTESTANTS = ("ours", "trainer", "trainer", "ours")
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
COMMON = (
    "model=hf",
    "seed=1",
    "device=cpu",
    "optimizer.lr=0.0005",
    "optimizer.beta2=0.999",
    "optimizer.weight_decay=0.01",
    "data.eval_samples=4",
    "logger=none",
)
TEXT = ("data=python_source", "task=language_modelling")
CLASSES = ("data=python_packages", "task=classification")


@dataclass(frozen=True)
class Case:
    """One model and how it is trained, for both contestants."""

    name: str
    kind: str  # transformers' word for the model
    head: str
    sizes: dict[str, Any]
    words: tuple[str, ...]  # for train.py
    num_steps: int  # that are timed, after as many
    history_steps: int = 40

    def overrides(self, folder: Path) -> list[str]:
        return [*COMMON, f"model.name={self.model_folder(folder)}", *self.words]

    def model_folder(self, folder: Path) -> Path:
        return folder.resolve() / "models" / f"{self.kind}_{len(json.dumps(self.sizes))}_{self.sizes['vocab_size']}"


SMALL = ("train.batch_size=4", "data.sequence_length=32", "stepping.clip=1.0")
USUAL = ("train.batch_size=8", "data.sequence_length=128", "stepping.clip=1.0")
CASES = (
    Case("GPT-2, fp32", "gpt2", "causal_lm", GPT2 | NO_DROPOUT, (*TEXT, *USUAL), 12),
    Case("BERT, fp32", "bert", "sequence_classification", BERT | NO_BERT_DROPOUT, (*CLASSES, *USUAL), 12),
    Case("tiny GPT-2, fp32", "gpt2", "causal_lm", TINY | NO_DROPOUT, (*TEXT, *SMALL), 200),
)


def make_model(case: Case, folder: Path) -> None:
    """Random weights that both start from, as transformers saves them."""
    from lowvram.models.hf import CLASSES as AUTO
    from lowvram.models.hf import Head, transformers

    config = transformers.AutoConfig.for_model(case.kind, **case.sizes)
    model = AUTO[Head[case.head]].from_config(config)
    model.save_pretrained(case.model_folder(folder))


def ours(case: Case, folder: Path, num_steps: int, log_every: int) -> dict[str, Any]:
    """What the command line does in this process: seconds after each logged step, and the loss of each."""
    from lowvram import cli
    from lowvram.results.metrics import Metrics

    times_s, losses, write = list[float](), list[float](), Metrics.write

    def noted(self: Metrics, step: int, values: Mapping[str, float]) -> None:
        if "loss/train" in values:
            times_s.append(time.process_time())
            losses.append(values["loss/train"])
        write(self, step, values)

    Metrics.write = noted
    run = folder.resolve() / "runs" / f"{time.time_ns()}"
    about = [f"train.steps={num_steps}", f"train.log_every={log_every}", f"hydra.run.dir={run}", "process=inline"]
    sys.argv = [str(ROOT / "train.py"), *case.overrides(folder), *about]
    with suppress(SystemExit):
        cli.main()
    return {"times_s": times_s, "losses": losses}


def samples_of(case: Case, folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """What our loader reads in so many steps, in that order, as keywords of a model of transformers."""
    from lowvram import job
    from lowvram.data.loader import batch_keys
    from lowvram.runs import Runs
    from lowvram.settings import settings

    with Runs(folder) as runs:
        whole = settings(runs.settings_of(case.overrides(folder)))
    data, batch_size = job.open_data(whole), whole.train.batch_size
    batches = islice(batch_keys(len(data.train), batch_size, whole.root.seed, 0), num_steps)
    samples = [data.train.sample(index, epoch) for keys in batches for index, epoch in keys]
    if case.head == "causal_lm":  # its own loss would shift the labels, and lose the last one
        return [{"input_ids": inputs, "labels": targets, "shift_labels": targets} for inputs, targets in samples]
    return [{**inputs, "labels": targets} for inputs, targets in samples]


def trainer(case: Case, folder: Path, num_steps: int, log_every: int) -> dict[str, Any]:
    """The same of a Trainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lowvram.models.hf import CLASSES as AUTO
    from lowvram.models.hf import Head

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % log_every == 0 or state.global_step == 1:
                times_s.append(time.process_time())

    class Kept(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    times_s, losses = list[float](), list[torch.Tensor]()
    options = settings_of_trainer(case, folder, num_steps)
    torch.set_num_threads(1)
    model = AUTO[Head[case.head]].from_pretrained(case.model_folder(folder))
    data: Any = samples_of(case, folder, num_steps)
    Kept(model, TrainingArguments(**options), train_dataset=data, callbacks=[Watch()]).train()
    return {"times_s": times_s, "losses": [loss.item() for loss in losses]}


def settings_of_trainer(case: Case, folder: Path, num_steps: int) -> dict[str, Any]:
    """The words of train.py in the Trainer's, and all that makes it faster."""
    said = dict(word.split("=", 1) for word in (*COMMON, *case.words))
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": num_steps,
        "per_device_train_batch_size": int(said["train.batch_size"]),
        "learning_rate": float(said["optimizer.lr"]),
        "adam_beta1": 0.9,
        "adam_beta2": float(said["optimizer.beta2"]),
        "weight_decay": float(said["optimizer.weight_decay"]),
        "max_grad_norm": float(said.get("stepping.clip", 0)),
        "bf16": said.get("precision") == "bf16",
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }


def apart(contestant: str, case: Case, folder: Path, num_steps: int, log_every: int) -> dict[str, Any]:
    """What one of them does in a process of its own."""
    words = [sys.executable, __file__, str(folder), f"--{contestant}", case.name, str(num_steps), str(log_every)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=os.environ | MALLOC)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def samples_per_s(case: Case, folder: Path, contestant: str) -> float:
    """Of the second half of the steps."""
    batch_size = int(next(word for word in case.words if "batch_size" in word).partition("=")[2])
    _, half, end = apart(contestant, case, folder, 2 * case.num_steps, case.num_steps)["times_s"]
    return case.num_steps * batch_size / (end - half)


def largest_difference(case: Case, folder: Path) -> float:
    """Of the losses of the first steps."""
    each = [apart(contestant, case, folder, case.history_steps, 1)["losses"] for contestant in CONTESTANTS[:2]]
    return max(abs(one - other) for one, other in zip(*each, strict=True))


def measured(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """One line of the results."""
    if not case.model_folder(folder).exists():
        make_model(case, folder)
    line: dict[str, Any] = {"case": case.name, "ours": [], "trainer": []}
    for number in range(rounds):
        for contestant in CONTESTANTS[2 * (number % 2) :][:2]:
            line[contestant].append(samples_per_s(case, folder, contestant))
    return {**line, "loss_difference": largest_difference(case, folder), "loss_steps": case.history_steps}


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A page of Markdown."""
    import torch
    import transformers

    yield "# Our fine-tuning step beside that of Hugging Face's Trainer\n"
    where = f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    yield f"`taskset -c 1 env OMP_NUM_THREADS=1 scripts/python scripts/bench_trainer.py FOLDER`: {where}. One thread on"
    yield "one core. Both cores were busy with other work too, so seconds are those that a process itself took of it."
    yield "malloc keeps what was freed. Medians over rounds (least to most), each process fresh; the ratio is that of"
    yield "neighbours in a round.\n"
    yield "| case | samples/s, ours | samples/s, Trainer | ours / Trainer | largest difference of a loss |"
    yield "|---|---:|---:|---:|---:|"
    for line in lines:
        ratios = [one / other for one, other in zip(line["ours"], line["trainer"], strict=True)]
        cells = [shown(line["ours"]), shown(line["trainer"]), shown(ratios, 3)]
        cells += [f"{line['loss_difference']:.1e} in {line['loss_steps']} steps"]
        yield f"| {line['case']}, {len(ratios)} rounds | {' | '.join(cells)} |"


def shown(values: Sequence[float], num_digits: int = 1) -> str:
    low, middle, high = (f"{each:.{num_digits}f}" for each in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 3:
        case = next(case for case in CASES if case.name == sys.argv[3])
        contestant = {"--ours": ours, "--trainer": trainer}[sys.argv[2]]
        print(json.dumps(contestant(case, folder, int(sys.argv[4]), int(sys.argv[5]))))
        return
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
