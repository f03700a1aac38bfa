"""How far plans lie from what points really take: predictions are frozen to a file first, then every point is measured.

    scripts/python scripts/benchmarks/plan_accuracy.py [FOLDER] [only=FAMILIES] [most=N] [print]

FAMILIES are some of transformer, hugging_face, convolution, compiled, with commas; without, all. Every point
(plan_accuracy_points.py) is planned with mode=plan, and then runs two updates in a fresh process with
mode=measure. On CUDA allocated and reserved bytes are held against the allocator's; on a CPU the least memory that the
plan asks for against the growth of the process with allocator=tight, never against the ledger that plans share.
Simple ways to predict stand beside it. FOLDER (default: outputs/plan_accuracy) keeps predictions.jsonl and
measured.jsonl: what is measured there isn't measured again. `most=N` measures no more than N points, `print` none. The
report is a Markdown page on standard output. About 20 minutes on 2 quiet cores.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.config.errors import BadInput
from lowvram.config.identity import device_name
from lowvram.config.settings import KNOB_GROUPS, Settings, settings
from lowvram.core.assemble import assemble
from lowvram.core.device import choose_device
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.loops.setup import open_data
from lowvram.results.row import Row, Status
from scripts.benchmarks.book import Book, stamp
from scripts.benchmarks.plan_accuracy_points import FAMILIES, Spec, cpu_points, cuda_points, write_models
from scripts.benchmarks.plan_accuracy_report import Line, Quantity, Report
from scripts.benchmarks.runs import Runs

BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and AdamW's two moments
TRACKED_EVERY = 6  # MemTracker looks at each so many-th point: it takes up to half a minute
COMMON = ["data=synthetic", "data.eval_samples=1"]
MEASURED = ["mode=measure", "measure.reruns=0", "measure.warmup_steps=1", "measure.steps=1", "timeout_s=600"]
ON_CPU = ["device=cpu", "allocator=tight"]


CPU_QUANTITIES = [Quantity("process growth", "process_bytes", "process_peak_bytes")]
CUDA_QUANTITIES = [
    Quantity("allocated", "allocated_bytes", "peak_bytes"),
    Quantity("reserved", "reserved_bytes", "reserved_bytes"),
]
BASELINES = {
    "tensors alone (the plan without its lines and the host)": "allocated_bytes",
    f"{BYTES_PER_PARAMETER} bytes per parameter": "sixteen_bytes",
    "torch's MemTracker on a CPU's fake tensors": "mem_tracker_bytes",
}


def key_of(spec: Spec) -> str:
    """What makes a point the same: its words and the versions that it ran with."""
    return " ".join([*spec.words, f"torch={torch.__version__}", f"on={device_name()}"])


def freeze(
    book: Book, specs: Sequence[Spec], runs: Runs, fixed: list[str], device: str, tracked_every: int | None
) -> None:
    """Predict what is not predicted yet. Nothing is measured before the file is written.

    Args:
        tracked_every: torch's MemTracker predicts each so many-th point, too; None: none.
    """
    known = book.read()
    missing = [spec for spec in specs if key_of(spec) not in known]
    words = {spec.name: [*fixed, *spec.words] for spec in missing}
    target = [f"plan.device={device}"]
    rows = runs.plan({name: [*each, *target] for name, each in words.items()}) if missing else []
    for number, (spec, row) in enumerate(zip(missing, rows, strict=True), start=1):
        say(f"predict {number} of {len(missing)}: {spec.name}")
        is_tracked = tracked_every is not None and specs.index(spec) % tracked_every == 0
        tracker = tracked(runs, words[spec.name]) if is_tracked else None
        book.add({**about(spec), **predicted(row), "mem_tracker_bytes": tracker})


def about(spec: Spec) -> Line:
    return {"key": key_of(spec), "name": spec.name, **stamp()}


def predicted(row: Row) -> Line:
    """Of the plan what is compared; and the size that follows from the number of parameters."""
    plan, parameters = row["plan"] or {}, row["model"]["parameters"]
    sizes = {
        name: plan.get(name) for name in ("allocated_bytes", "reserved_bytes", "process_bytes", "least_vram_bytes")
    }
    sixteen = parameters and parameters * BYTES_PER_PARAMETER
    return {"status": row["status"], "reason": row["reason"], **sizes, "sixteen_bytes": sixteen}


def tracked(runs: Runs, words: list[str]) -> int | None:
    """The peak that torch's MemTracker sees; None where it can't follow."""
    whole = settings(runs.settings_of(words))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tracked_bytes(whole)
    except Exception as error:  # whatever it can't do, in whatever way it ends
        say(f"MemTracker can't: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
        return None


def tracked_bytes(whole: Settings) -> int:
    """Two steps on fake tensors of the CPU as it is, without what a plan knows of devices."""
    cpu = torch.device("cpu")
    problem = whole.groups["task"].pose(whole.groups["model"], open_data(whole).spec)
    knobs = {group: whole.groups[group] for group in KNOB_GROUPS if group != "allocator"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        rig = assemble(problem, knobs, cpu, whole.root.seed)
        tracker = MemTracker()
        tracker.track_external(rig.model)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                step(rig, Part(*problem.spec.example(whole.train.batch_size)))
        return int(tracker.get_tracker_snapshot("peak")[cpu]["Total"])


def measure(book: Book, specs: Iterable[Spec], runs: Runs, fixed: list[str], most: int | None) -> None:
    """Run what has not come to an end yet, each in a fresh process."""
    known = book.read()
    missing = [spec for spec in specs if not is_done(known.get(key_of(spec)))][:most]
    for number, spec in enumerate(missing, start=1):
        say(f"measure {number} of {len(missing)}: {spec.name}")
        row = runs.run(spec.name, [*MEASURED, *fixed, *spec.words])
        memory = {name: row["memory"][name] for name in ("peak_bytes", "reserved_bytes", "process_peak_bytes")}
        more = {"threads": row["provenance"]["threads"], "total_s": row["time"]["total_s"]}
        book.add({**about(spec), "status": row["status"], "reason": row["reason"], **memory, **more})


def by_name(specs: Iterable[Spec], book: Book) -> dict[str, Line]:
    """What the book says of points, on this machine and with this torch."""
    lines = book.read()
    return {spec.name: lines[key_of(spec)] for spec in specs if key_of(spec) in lines}


def is_done(line: Line | None) -> bool:
    """Whether a measurement stands: one that was ended from outside is made again."""
    return line is not None and Status(line["status"]).is_final


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Asked(NamedTuple):
    """What was typed."""

    folder: Path
    families: tuple[str, ...]
    most: int | None  # points that are measured


def asked(
    words: Sequence[str], default: Path = Path("outputs/plan_accuracy"), known: Sequence[str] = FAMILIES
) -> Asked:
    """Raises BadInput for what is not known."""
    folder, families, most = default, tuple(known), None
    for word in words:
        key, equals, value = word.partition("=")
        if word == "print":
            most = 0
        elif key == "only" and equals:
            families = tuple(value.split(","))
            if unknown := set(families) - set(known):
                raise BadInput("only", ", ".join(sorted(unknown)), f"some of {', '.join(known)}, with commas")
        elif key == "most" and equals:
            if not value.isdigit():
                raise BadInput("most", value, "a number of points, 0 or more")
            most = int(value)
        elif equals:
            raise BadInput(key, value, "only=…, most=…, print, or a folder")
        else:
            folder = Path(word)
    return Asked(folder, families, most)


def main() -> None:
    try:
        given = asked(sys.argv[1:])
    except BadInput as error:
        raise SystemExit(str(error)) from None
    write_models()
    is_cuda = choose_device("auto").type == "cuda"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    specs = [spec for spec in (cuda_points() if is_cuda else cpu_points(has_bf16)) if spec.family in given.families]
    fixed, target = (COMMON, "auto") if is_cuda else ([*COMMON, *ON_CPU], "cpu")
    predictions, measured = (Book(given.folder / f"{name}.jsonl") for name in ("predictions", "measured"))
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        freeze(predictions, specs, runs, fixed, target, TRACKED_EVERY)
        measure(measured, specs, runs, fixed, given.most)
    baselines = {name: key for name, key in BASELINES.items() if not (is_cuda and key == "allocated_bytes")}
    quantities = CUDA_QUANTITIES if is_cuda else CPU_QUANTITIES
    report = Report(specs, by_name(specs, predictions), by_name(specs, measured), quantities, baselines)
    command = " ".join(["scripts/python scripts/benchmarks/plan_accuracy.py", *sys.argv[1:]])
    print(f"# Planned beside measured\n\n`{command}`: torch {torch.__version__}, {device_name()}; MiB.\n")
    print("\n".join(report.lines()))


if __name__ == "__main__":
    main()
