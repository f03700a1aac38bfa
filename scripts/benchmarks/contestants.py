"""What a bench of contestants needs: one model and how it is trained, and our command line as the first of them. The
others are in peers.py.

Each runs in a process of its own and tells when its steps ended, what its losses were and how much memory it took. On
a CPU they run side by side: what a shared machine does to one of them, it does to all. All have the same weights,
samples, order, precision and optimizer; with `savings`, each has what it offers to save memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, final

from lowvram.config.identity import ROOT
from lowvram.data.batch_sizes import SameSize

if TYPE_CHECKING:
    from lowvram.config.settings import Settings

KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}  # what was freed, by malloc
BF16, BF16_WEIGHTS, CHECKPOINTING, ONE_BY_ONE = "bf16", "bf16_weights", "checkpointing", "micro1"
EIGHT_BITS, FOUR_BITS, ADAFACTOR = "8bit", "4bit", "adafactor"
SAVINGS = {
    BF16: "precision=bf16",
    BF16_WEIGHTS: "precision=bf16_pure",
    CHECKPOINTING: "ckpt=every1",
    EIGHT_BITS: "optimizer=adamw_8bit",
    FOUR_BITS: "optimizer=adamw_4bit",
    ADAFACTOR: "optimizer=adafactor",
}
BETA2 = "optimizer.beta2=0.999"  # which Adafactor has none of
COMMON = (
    "model=hf",
    "seed=1",
    "optimizer.lr=0.0005",
    "optimizer.weight_decay=0.01",
    "data.eval_samples=4",
    "logger=none",
)
MEETING, PARTNERS = "LOWVRAM_BENCH_MEETING", "LOWVRAM_BENCH_PARTNERS"  # a folder, and how many meet there
Told = dict[str, Any]  # times_s and losses of steps, peak_bytes, and on a card reserved_bytes


@final
@dataclass(frozen=True)
class Case:
    """One model and how it is trained, for every contestant."""

    name: str
    kind: str  # transformers' word for the model
    head: str
    sizes: dict[str, Any]
    words: tuple[str, ...]  # for train.py
    num_steps: int  # that are timed, after as many
    history_steps: int = 40
    savings: frozenset[str] = field(default_factory=frozenset)
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)

    def overrides(self, folder: Path) -> list[str]:
        saving = [word for name, word in SAVINGS.items() if name in self.savings]
        saving += [] if ADAFACTOR in self.savings else [BETA2]
        accum = [f"accum=x{self.num_parts}"] if self.num_parts > 1 else []
        model = f"model.name={self.model_folder(folder)}"
        return [*COMMON, f"device={self.device}", model, *saving, *accum, *self.words]

    def model_folder(self, folder: Path) -> Path:
        return folder.resolve() / "models" / f"{self.kind}_{len(json.dumps(self.sizes))}_{self.sizes['vocab_size']}"

    @property
    def said(self) -> dict[str, str]:
        """Words of train.py by key."""
        return dict(word.split("=", 1) for word in (*COMMON, BETA2, *self.words))

    @property
    def batch_size(self) -> int:
        return int(self.said["train.batch_size"])

    @property
    def num_parts(self) -> int:
        return self.batch_size if ONE_BY_ONE in self.savings else 1

    @property
    def clip(self) -> float:
        return float(self.said.get("stepping.clip", 0))


Contestant = Callable[[Case, Path, int, int], Told]  # case, folder, number of steps, steps between marks


def make_model(case: Case, folder: Path) -> None:
    """Random weights that all start from, as transformers saves them."""
    from lowvram.models.hf import Head, transformers
    from lowvram.models.hf_heads import CLASSES as AUTO

    if not case.model_folder(folder).exists():
        config = transformers.AutoConfig.for_model(case.kind, **case.sizes)
        AUTO[Head[case.head]].from_config(config).save_pretrained(case.model_folder(folder))


def settings_of(case: Case, folder: Path) -> Settings:
    """What our command line would train."""
    from lowvram.config.settings import settings
    from scripts.benchmarks.runs import Runs

    with Runs(folder) as runs:
        return settings(runs.settings_of(case.overrides(folder)))


def samples_of(case: Case, whole: Settings, num_steps: int) -> list[dict[str, Any]]:
    """What our loader reads in so many steps, in that order, as keywords of a model of transformers."""
    from lowvram.data.loader import batch_keys
    from lowvram.worker import job

    data = job.open_data(whole)
    batches = islice(batch_keys(data.train, SameSize(case.batch_size), whole.root.seed, 0), num_steps)
    samples = [data.train.sample(index, epoch) for keys in batches for index, epoch in keys]
    if case.head == "causal_lm":  # its own loss would shift the labels, and lose the last one
        return [{"input_ids": inputs, "labels": targets, "shift_labels": targets} for inputs, targets in samples]
    return [{**inputs, "labels": targets} for inputs, targets in samples]


@cache
def meet() -> None:
    """Wait here, the first time, for all that run beside this process: what follows is done under equal conditions."""
    folder = Path(os.environ[MEETING])
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < int(os.environ[PARTNERS]):
        time.sleep(0.01)


def now_s(case: Case) -> float:
    """On a card the time when it has done its work; else the processor's time that this process took."""
    import torch

    meet()
    if case.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def ours(case: Case, folder: Path, num_steps: int, log_every: int) -> Told:
    """What the command line does in this process: seconds after each logged step, and the loss of each."""
    from lowvram.cli import main as cli
    from lowvram.loops.metrics_log import Metrics
    from lowvram.results.row import read

    times_s, losses, write = list[float](), list[float](), Metrics.write

    def noted(self: Metrics, step: int, values: Mapping[str, float]) -> None:
        if "loss/train" in values:
            times_s.append(now_s(case))
            losses.append(values["loss/train"])
        write(self, step, values)

    Metrics.write = noted
    run = folder.resolve() / "runs" / f"{time.time_ns()}"
    about = [f"train.steps={num_steps}", f"train.log_every={log_every}", f"hydra.run.dir={run}", "process=inline"]
    sys.argv = [str(ROOT / "train.py"), *case.overrides(folder), *about]
    with suppress(SystemExit):
        cli.main()
    if len(losses) < num_steps // log_every:
        raise RuntimeError(f"train.py ended before its last step: {' '.join(sys.argv[1:])}")
    memory = (read(run) or {"memory": {}})["memory"]
    name = "process_peak_bytes" if case.device == "cpu" else "peak_bytes"
    bytes_of = {"peak_bytes": memory.get(name), "reserved_bytes": memory.get("reserved_bytes")}
    return {"times_s": times_s, "losses": losses, **bytes_of}


def resident_bytes() -> int:
    """Of this process, with all that it has imported; its peak begins here."""
    from lowvram.loops.fields import status_bytes
    from lowvram.worker.main import write_proc

    write_proc("clear_refs", "5")
    return status_bytes("VmRSS")


def memory_of(case: Case, before: int) -> Told:
    """On a card its allocator's peaks, as in our rows; else by how much the process has grown at its peak."""
    import torch

    from lowvram.loops.fields import status_bytes

    if case.device == "cpu":
        return {"peak_bytes": status_bytes("VmHWM") - before, "reserved_bytes": None}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def perform(contestants: Mapping[str, Contestant], cases: Sequence[Case], words: Sequence[str]) -> None:
    """In a process of its own: FOLDER CONTESTANT CASE STEPS LOG_EVERY."""
    import torch

    folder, contestant, name, num_steps, log_every = words
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    (case,) = (case for case in cases if case.name == name)
    print(json.dumps(contestants[contestant](case, Path(folder), int(num_steps), int(log_every))))


def apart(
    program: str,
    contestants: Sequence[str],
    case: Case,
    folder: Path,
    num_steps: int,
    log_every: int,
    words: Sequence[str] = (),
) -> list[Told]:
    """What each does in a process of its own, all at the same time: `program` with these words, and then what `perform`
    takes."""
    with TemporaryDirectory() as meeting, TemporaryDirectory() as told:
        environment = {**os.environ, **case.environment, MEETING: meeting, PARTNERS: str(len(contestants))}
        running: list[subprocess.Popen[bytes]] = []
        for name in contestants:
            about = ["--perform", str(folder), name, case.name, str(num_steps), str(log_every)]
            with Path(told, name).open("wb") as out, Path(told, f"{name}.err").open("wb") as err:
                command = [sys.executable, program, *words, *about]
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        failed = first_failure(running)
        if failed is not None:
            raise RuntimeError(Path(told, f"{contestants[failed]}.err").read_text())
        return [json.loads(Path(told, name).read_text().splitlines()[-1]) for name in contestants]


def first_failure(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Which process failed, as soon as one has: the others, who would wait for it, are killed. None when all are
    done."""
    while None in (codes := [process.poll() for process in running]) and not any(codes):
        time.sleep(0.1)
    for process in running:
        process.kill()
        process.wait()
    return next((index for index, code in enumerate(codes) if code), None)


class Measured(NamedTuple):
    """Samples per second of the second half of the steps, and the peaks of all in bytes."""

    samples_per_s: float
    peak_bytes: int
    reserved_bytes: int | None  # None on a CPU


def timed(
    program: str, contestants: Sequence[str], case: Case, folder: Path, words: Sequence[str] = ()
) -> Iterator[tuple[str, Measured]]:
    """Each contestant and what was measured. On a CPU they run side by side and share its cores in turns of
    milliseconds; each has a card for itself."""
    for group in [contestants] if case.device == "cpu" else [[name] for name in contestants]:
        each = apart(program, group, case, folder, 2 * case.num_steps, case.num_steps, words)
        for name, told in zip(group, each, strict=True):
            *_, half, end = told["times_s"]
            speed = case.num_steps * case.batch_size / (end - half)
            yield name, Measured(speed, told["peak_bytes"], told["reserved_bytes"])


def shown(values: Sequence[float], num_digits: int = 1) -> str:
    low, middle, high = (f"{each:.{num_digits}f}" for each in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
