"""How small a training run becomes, knob by knob, and what that costs: `sweep=waterfall` of a Transformer and of a
ResNet, from eager fp32 with AdamW down to all knobs together.

    scripts/python scripts/benchmarks/bench_headline.py [full|scaled]
        [case=transformer,resnet,transformer_band,resnet_band,transformer_smallest,resnet_smallest,
              transformer_losses,resnet_losses]
        [last=GROUP,...] [without=GROUP,...] [overrides...]

full: gpt2_medium at 32 x 1,024 tokens and resnet50 at 224 px and 256 images, for one CUDA device. scaled: the same on a
CPU, a Transformer of 8 layers, 512 features and 50,257 tokens at 16 x 256, resnet50 at 128 px and 32 images. A band
trains the default model for 100 steps with all knobs, and holds its losses against three seeds of the reference
(measure.fidelity). The smallest are the points of sweep=smallest and sweep=smallest_resnet; losses trains default
models with the words of these points, on the CPU, for 100 steps from three seeds. Overrides are words of train.py, for
every point.

last and without: where a processor has no products in bf16, `last=precision` shows that step after all others, and
`without=precision` leaves it out.

What was measured is kept in outputs/bench_headline and not measured again. Results go to docs/results/DEVICE/: of
each case the rows, and a page about them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from lowvram.config.defaults import CONF
from lowvram.config.identity import ROOT, device_name
from lowvram.results import table
from lowvram.results.files.durable import write_text
from lowvram.results.row import Row, Status, size_text, to_json
from scripts.benchmarks import headline_losses

EMULATED = "EMULATED_VALUES" in os.environ  # scripts/emulated_gpu
FOLDER = Path("outputs/bench_headline")  # below the checkout, where the sweeps run
SMALLEST = {"transformer_smallest": "smallest", "resnet_smallest": "smallest_resnet"}  # options of `sweep`
LOSSES = {"transformer_losses": "smallest", "resnet_losses": "smallest_resnet"}
WATERFALL = OmegaConf.load(CONF / "sweep" / "waterfall.yaml").hydra.sweeper.points
ALL = list(WATERFALL.values())[-1]  # words of all knobs together
COMMON = ("mode=measure", "logger=none", "measure.warmup_steps=2", "measure.steps=2", "measure.max_seconds=600")
BAND = ("mode=measure", "logger=none", "measure.fidelity=true", "measure.fidelity_steps=100", "measure.reruns=0")
SIZES = {
    "full": {
        "transformer": ("model=gpt2_medium", "data.sequence_length=1024", "train.batch_size=32"),
        "resnet": ("model=resnet50", "model.norm=group", "data.image_size=224", "train.batch_size=256"),
    },
    "scaled": {
        "transformer": (
            *("model=transformer", "model.num_layers=8", "model.width=512", "model.num_heads=8", "model.context=256"),
            *("model.vocab_size=50257", "data.sequence_length=256", "train.batch_size=16"),
            *("data.eval_samples=2", "measure.reruns=0"),
        ),
        "resnet": (
            *("model=resnet50", "model.norm=group", "data.image_size=128", "train.batch_size=32"),
            *("data.eval_samples=32", "measure.reruns=0"),
        ),
    },
}
TITLES = {
    "transformer": "A waterfall of knobs: a Transformer",
    "resnet": "A waterfall of knobs: ResNet-50",
    "transformer_band": "All knobs beside three seeds without any: the default Transformer",
    "resnet_band": "All knobs beside three seeds without any: the default ResNet",
    "transformer_smallest": "The smallest peaks: a Transformer",
    "resnet_smallest": "The smallest peaks: ResNet-50",
    "transformer_losses": "Losses of the smallest peaks: the default Transformer",
    "resnet_losses": "Losses of the smallest peaks: the default ResNet",
}
BANDS = {"transformer_band": ("model=transformer",), "resnet_band": ("model=resnet", "model.norm=group")}


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    size: str
    cases: list[str]
    last: list[str]  # groups
    without: list[str]
    overrides: list[str]

    def words(self, case: str) -> list[str]:
        """For train.py."""
        own = self.common(case)
        if case in SMALLEST:
            without_norm = [word for word in own if group_of(word) != "model.norm"]  # the points name it
            sweep = f"sweep={SMALLEST[case]}"
            return [sweep, *without_norm, *self.overrides, f"hydra.sweep.dir={self.folder(case)}"]
        points = self.points(batch_size([*own, *self.overrides]))
        if case in BANDS:
            points = dict([list(points.items())[-1]])
        if case in LOSSES:
            points = self.losses(case)
        listed = ", ".join(f"{name}: '{words}'" for name, words in points.items())
        about = f"hydra.sweeper.points={{{listed}}}"
        return ["-m", *own, *self.overrides, about, f"hydra.sweep.dir={self.folder(case)}"]

    def common(self, case: str) -> tuple[str, ...]:
        """The words of all points of a case."""
        model = case.partition("_")[0]
        if case in BANDS:
            return *BAND, *BANDS[case]
        if case in LOSSES:
            return *headline_losses.COMMON, *headline_losses.SIZES[model]
        return *COMMON, *SIZES[self.size][model]

    def losses(self, case: str) -> dict[str, str]:
        """Names and words of the preset's points, for a batch of this case."""
        size = batch_size([*self.common(case), *self.overrides])
        points = points_of(LOSSES[case]).items()
        return {name.replace(",", ""): headline_losses.in_parts(words, size) for name, words in points}

    def points(self, batch_size: int) -> dict[str, str]:
        """Names and words of a waterfall's points, in parts of one sample where there are up to 32."""
        kept = [word for word in ALL.split() if group_of(word) not in self.without]
        kept.sort(key=lambda word: group_of(word) in self.last)
        kept = [f"accum=x{min(32, batch_size)}" if group_of(word) == "accum" else word for word in kept]
        named = {f"+{group_of(word)}": " ".join(kept[: number + 1]) for number, word in enumerate(kept)}
        return {"baseline": "", **named}

    def folder(self, case: str) -> Path:
        return FOLDER / f"{case}_{self.size}"


def group_of(word: str) -> str:
    return word.partition("=")[0]


def batch_size(words: Sequence[str]) -> int:
    """As the last of them says."""
    typed = [word.partition("=")[2] for word in words if word.startswith("train.batch_size=")]
    return int(typed[-1]) if typed else 32


def points_of(sweep: str) -> dict[str, str]:
    """Names and words of a preset's points."""
    return dict(OmegaConf.load(CONF / "sweep" / f"{sweep}.yaml").hydra.sweeper.points)


def measure(words: Sequence[str]) -> None:
    """The sweep, as far as it is missing. Its Ctrl-C is ours."""
    subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT, check=False)


def page(plan: Plan, case: str, rows: Sequence[Row]) -> Iterator[str]:
    """Markdown about one case."""
    about = rows[0]["provenance"]
    yield f"# {TITLES[case]}\n"
    where = "an emulated card" if EMULATED else device_name()
    yield f"Made by `{shlex.join(['scripts/benchmarks/bench_headline.py', *sys.argv[1:]])}` on {where},"
    yield f"{about['threads']} thread(s), torch {about['torch']}, lowvram at {str(about['git_sha'])[:12]}:\n"
    yield f"`{shlex.join(['python', 'train.py', *plan.words(case)])}`\n"
    if case in SMALLEST:
        yield from smallest_lines(rows, SMALLEST[case])
    elif case in LOSSES:
        yield from headline_losses.lines(rows, plan.losses(case))
    else:
        yield from (band_lines if case in BANDS else waterfall_lines)(rows)


def waterfall_lines(rows: Sequence[Row]) -> Iterator[str]:
    by_name = {table.label(row): row for row in rows}
    first, accumulated = by_name["baseline"], by_name.get("+accum")
    seconds = sum(row["time"]["total_s"] or 0 for row in rows)
    source = table.SOURCES.get(first["memory"]["source"], "unknown")
    yield f"| point | peak ({source}) | smaller by | beyond | samples/s | of the baseline's | last loss | host |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = [table.label(row) + ("*" if row["disturbed"] else ""), *cells_of(row, first, accumulated)]
        yield f"| {' | '.join(cells)} |"
    yield f"\nThe points took {seconds / 60:.0f} minutes together, each in a process of its own: two updates of"
    yield "warm-up, two that are timed. *Beyond*: how many times smaller than with plain accumulation. *Host*: what is"
    yield "kept outside the device, no part of the peak. A star marks what was disturbed: others took part of the"
    yield "processor, or times spread."


def smallest_lines(rows: Sequence[Row], sweep: str) -> Iterator[str]:
    """Peaks beside their plans. On an emulated card nothing is timed, so times are planned ones."""
    by_name = {table.label(row): row for row in rows}
    first, accumulated = (by_name[name]["memory"] for name in ("baseline", "+accum"))
    yield "| point | peak | smaller by | beyond accumulation | planned peak | host | planned ms a step |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        memory, plan = row["memory"], row["plan"]
        if row["status"] != Status.OK:
            yield f"| {table.label(row)} | {row['status']}: {row['reason']} |" + " |" * 5
            continue
        times = [f"{each['peak_bytes'] / memory['peak_bytes']:.1f} x" for each in (first, accumulated)]
        host_bytes = (memory["by_kind_max"] or {}).get("host") or 0
        cells = [size_text(memory["peak_bytes"]), *times, size_text(plan["allocated_bytes"]), size_text(host_bytes)]
        yield f"| {' | '.join([table.label(row), *cells, format(plan['step_ms'] or 0, '.0f')])} |"
    yield "\nEach point is a process of its own. Peaks are what tensors take of torch's caching allocator; *host* is"
    yield "what is kept outside the device. The words of each point:\n"
    yield from (f"- {name}: `{words or 'none'}`" for name, words in points_of(sweep).items())
    if EMULATED:
        yield "\nThe card is [emulated](README.md): the allocator is torch's own, memory is counted, nothing is timed."


def cells_of(row: Row, first: Row, accumulated: Row | None) -> list[str]:
    if row["status"] != Status.OK:
        return [f"{row['status']}: {row['reason']}", *[""] * 6]
    peak_bytes, speed = row["memory"]["peak_bytes"], row["throughput"]["samples_per_s"]
    accumulated_bytes = accumulated["memory"]["peak_bytes"] if accumulated and row is not first else None
    host_bytes = (row["memory"]["by_kind_max"] or {}).get("host") or 0
    return [
        size_text(peak_bytes),
        f"{first['memory']['peak_bytes'] / peak_bytes:.2f} x",
        f"{accumulated_bytes / peak_bytes:.2f} x" if accumulated_bytes else "",
        f"{speed:.3g}",
        f"{speed / first['throughput']['samples_per_s']:.2f}",
        f"{row['loss']['last']:.4f}",
        size_text(host_bytes) if host_bytes else "",
    ]


def band_lines(rows: Sequence[Row]) -> Iterator[str]:
    """How far the losses of all knobs together leave the band of the reference's seeds."""
    for row in rows:
        found = row["fidelity"] or {"reason": row["reason"]}
        if found["reason"]:
            yield f"{table.label(row)}: {found['reason']}"
            continue
        low, middle, high = found["band"][-1]
        knobs = " ".join(f"{group}={row['choices'][group]}" for group in groups_of(row))
        yield f"All knobs (`{knobs}`):"
        yield f"in {found['steps']} steps the losses leave the band of three seeds by {found['loss_gap']:.2%} at most;"
        yield f"the last is {found['losses'][-1]:.4f}, the band's {low:.4f} to {high:.4f} (mean {middle:.4f}). Error of"
        yield f"the first gradient: {found['gradient_error']:.1e}, cosine {found['gradient_cosine']:.6f}."


def groups_of(row: Row) -> list[str]:
    added = {group_of(word) for word in ALL.split()}
    return [group for group in row["choices"] if group in added]


def results_folder(card: str | None = None) -> Path:
    """docs/results/cpu, or emulated, or one of the card's name, such as h200.

    Args:
        card: as its driver calls it; None: this machine's, if it has one.
    """
    if EMULATED:
        return ROOT / "docs" / "results" / "emulated"
    if card is None and any(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        card = device_name()
    name = re.sub(r"\W+", "_", card.lower()).strip("_").removeprefix("nvidia_") if card else "cpu"
    return ROOT / "docs" / "results" / name


def asked(arguments: Sequence[str]) -> Plan:
    """Of the command line. Exits at a word that nothing knows."""
    listed = {"case": "transformer,resnet", "last": "", "without": ""}
    sizes = [word for word in arguments if word in SIZES]
    words = [word for word in arguments if group_of(word) not in listed and word not in SIZES]
    listed |= {key: value for key, _, value in (word.partition("=") for word in arguments) if key in listed}
    cases, last, without = ([each for each in listed[name].split(",") if each] for name in ("case", "last", "without"))
    for case in cases:
        if case not in TITLES:
            sys.exit(f"case={case}: must be some of {', '.join(TITLES)}")
    return Plan(sizes[0] if sizes else "full", cases, last, without, words)


def main() -> None:
    plan = asked(sys.argv[1:])
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for case in plan.cases:
        measure(plan.words(case))
        rows, name = table.collect(ROOT / plan.folder(case)), f"bench_headline_{case}_{plan.size}"
        if not rows:
            sys.exit(1)  # the sweep has said why
        write_text(folder / f"{name}.jsonl", "".join(f"{to_json(row)}\n" for row in rows))
        write_text(folder / f"{name}.md", "\n".join(page(plan, case, rows)) + "\n")


if __name__ == "__main__":
    main()
