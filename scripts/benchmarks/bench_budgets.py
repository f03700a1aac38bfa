"""The least vram under which a point runs on a CPU, beside the least that its plan asks for.

    scripts/python scripts/benchmarks/bench_budgets.py [FOLDER] [only=NAME,NAME]

Each point runs two updates in fresh processes under caps that close in on the smallest one that it survives, to 1 % of
it (at least 1 MiB). FOLDER (default: outputs/bench_budgets) keeps each verdict; what is known isn't run again. The
lines of plans for a CPU were set with these points in view: none is held out. The report is a Markdown page on standard
output. Some 20 minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowvram.config.identity import device_name
from lowvram.models.hf_source import transformers
from lowvram.results.row import Row
from scripts.benchmarks.runs import Runs

MIB = 2**20
MODELS = Path("outputs/models_of_budgets")
COMMON = ["device=cpu", "data.eval_samples=2", "measure.reruns=0", "measure.warmup_steps=1", "measure.steps=1"]
SHARE, LEAST_STEP_BYTES, FIRST_STEP_BYTES = 0.01, MIB, 4 * MIB
TEXTS, IMAGES = ["data=synthetic", "data.sequence_length=128"], ["data=synthetic", "data.image_size=64"]
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8000}
HF: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8000},
    "llama": {"architectures": ["LlamaForCausalLM"], **SMALL, "num_key_value_heads": 2, "intermediate_size": 700},
    "bert": {"architectures": ["BertForSequenceClassification"], **SMALL, "intermediate_size": 1024},
    "vit": {"architectures": ["ViTForImageClassification"], **SMALL, "intermediate_size": 1024, "image_size": 64},
    "opt": {"architectures": ["OPTForCausalLM"], **SMALL, "ffn_dim": 1024, "word_embed_proj_dim": 256},
    "convnext": {
        "architectures": ["ConvNextForImageClassification"],
        "hidden_sizes": [32, 64, 128, 256],
        "depths": [1, 1, 2, 1],
        "image_size": 64,
    },
}


class Spec(NamedTuple):
    """A point: the words of the command line."""

    name: str
    words: list[str]


def hf(kind: str, *words: str) -> list[str]:
    reads = IMAGES if "image_size" in HF[kind] else TEXTS
    return ["model=hf", f"model.name={MODELS / kind}", *reads, *words]


def external(name: str, reads: list[str], *words: str) -> list[str]:
    kind = "IMAGES" if reads is IMAGES else "TOKENS"
    return [
        "model=external",
        f"model.target=scripts.benchmarks.strangers.{name}",
        f"model.reads={kind}",
        *reads,
        *words,
    ]


CLASSES, VOCABULARY = "model.args={num_classes: data.num_classes}", "model.args={vocab_size: data.vocab_size}"
OWN = ["model=transformer", "model.num_layers=8", *TEXTS]
RESNET = ["model=resnet", *IMAGES]
SPECS = [
    Spec("transformer", OWN),
    Spec("transformer every1", [*OWN, "ckpt=every1"]),
    Spec("transformer chunked x2", [*OWN, "logits=chunked", "accum=x2"]),
    Spec("transformer in_backward", [*OWN, "stepping=in_backward", "optimizer=sgd"]),
    Spec("transformer cpu_offload", [*OWN, "stepping=cpu_offload"]),
    Spec("transformer x32", [*OWN, "accum=x32"]),
    Spec("transformer muon", [*OWN, "optimizer=muon"]),
    Spec("transformer adafactor every2", [*OWN, "optimizer=adafactor", "ckpt=every2"]),
    Spec("transformer offload", [*OWN, "offload=activations"]),
    Spec("resnet", RESNET),
    Spec("resnet every1", [*RESNET, "ckpt=every1"]),
    Spec("resnet x4", [*RESNET, "accum=x4"]),
    Spec("resnet18", ["model=resnet18", *IMAGES, "train.batch_size=16"]),
    Spec("resnet50", ["model=resnet50", *IMAGES, "train.batch_size=8"]),
    Spec("resnet group every2", [*RESNET, "model.norm=group", "ckpt=every2"]),
    Spec("gpt2", hf("gpt2", "train.batch_size=16")),
    Spec("llama", hf("llama", "train.batch_size=16")),
    Spec("bert", hf("bert")),
    Spec("vit", hf("vit", "train.batch_size=64")),
    Spec("opt", hf("opt", "train.batch_size=16")),
    Spec("convnext", hf("convnext", "train.batch_size=16")),
    Spec("patches", external("PatchTransformer", IMAGES, CLASSES, "train.batch_size=64")),
    Spec("hourglass", external("Hourglass", IMAGES, CLASSES, "train.batch_size=16")),
    Spec("mixer", external("Mixer", IMAGES, CLASSES, "train.batch_size=64")),
    Spec("recurrent", external("Recurrent", TEXTS, VOCABULARY, "train.batch_size=16")),
]


@dataclass
class Verdicts:
    """What is known of points: for each the caps in bytes that were tried, and whether it ran to its end."""

    path: Path
    known: dict[str, dict[int, bool]] = field(default_factory=dict)

    def load(self) -> Verdicts:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            entry = json.loads(line)
            self.known.setdefault(entry["point"], {})[entry["vram_bytes"]] = entry["ran"]
        return self

    def of(self, spec: Spec) -> dict[int, bool]:
        return dict(self.known.get(spec.name, {}))

    def ran(self, runs: Runs, spec: Spec, vram_bytes: int) -> bool:
        verdicts = self.known.setdefault(spec.name, {})
        if vram_bytes not in verdicts:
            verdicts[vram_bytes] = runs_under(runs, spec, vram_bytes)
            with self.path.open("a") as file:
                entry = {"point": spec.name, "vram_bytes": vram_bytes, "ran": verdicts[vram_bytes]}
                file.write(json.dumps(entry | {"torch": torch.__version__, "on": device_name()}) + "\n")
        return verdicts[vram_bytes]


def runs_under(runs: Runs, spec: Spec, vram_bytes: int) -> bool:
    row = runs.run(spec.name, ["mode=measure", *COMMON, *spec.words, f"vram={vram_bytes // 1024}KiB"])
    if row["status"] not in ("ok", "oom"):
        raise SystemExit(f"{spec.name} under {vram_bytes / MIB:.0f} MiB: {row['status']}: {row['reason']}")
    print(f"{spec.name}: {row['status']} under {vram_bytes / MIB:.1f} MiB", file=sys.stderr, flush=True)
    return row["status"] == "ok"


def least_bytes(is_enough: Callable[[int], bool], known: dict[int, bool], first_bytes: int) -> int:
    """The smallest cap that is enough, to `SHARE` of it. Caps are multiples of 1 MiB.

    Args:
        known: caps that were tried before, and whether they were enough.
        first_bytes: where to begin if there are none.
    """
    first, step = first_bytes // MIB * MIB, FIRST_STEP_BYTES
    low = max((cap for cap, is_it in known.items() if not is_it), default=first)
    high = min((cap for cap, is_it in known.items() if is_it), default=max(low, first) + step)
    while not is_enough(high):
        low, high, step = high, high + 2 * step, 2 * step
    while low > 0 and is_enough(low):
        low, high, step = max(0, low - 2 * step), low, 2 * step
    while high - low > max(SHARE * high, LEAST_STEP_BYTES):
        middle = (low + high) // 2 // MIB * MIB
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def report(specs: list[Spec], plans: dict[str, Row], least: dict[str, int]) -> Iterator[str]:
    """A page of Markdown, in MiB."""
    yield "# The least vram beside the planned\n"
    yield f"`scripts/python scripts/benchmarks/bench_budgets.py`: torch {torch.__version__}, {device_name()}; MiB.\n"
    yield "| point | least vram | planned | with its margin | that is more by |"
    yield "|---|---:|---:|---:|---:|"
    num_short = 0
    for spec in specs:
        plan, real = plans[spec.name]["plan"], least[spec.name] / MIB
        planned = plan["least_vram_bytes"] / MIB
        asked = planned * (1 + plan["margin"])
        num_short += asked < real
        yield f"| {spec.name} | {real:.0f} | {planned:.1f} | {asked:.1f} | {asked - real:.1f} |"
    yield f"\n{num_short} of {len(specs)} points would run out of memory under the vram that their plan asks for."


def main() -> None:
    folder, only = Path("outputs/bench_budgets"), None
    for word in sys.argv[1:]:
        key, equals, value = word.partition("=")
        if key == "only" and equals:
            only = value.split(",")
        else:
            folder = Path(word)
    specs = [spec for spec in SPECS if only is None or spec.name in only]
    for kind, changes in HF.items():
        transformers.AutoConfig.for_model(kind, **changes).save_pretrained(MODELS / kind)
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = Verdicts(folder / "verdicts.jsonl").load()
    least: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as points, Runs(Path(points) / "points") as runs:
        rows = runs.plan({spec.name: [*COMMON, *spec.words, "vram=100GiB"] for spec in specs})
        plans = dict(zip([spec.name for spec in specs], rows, strict=True))
        for spec in specs:
            if plans[spec.name]["status"] != "ok":
                print(f"{spec.name}: {plans[spec.name]['reason']}", file=sys.stderr)
                continue
            is_enough = partial(verdicts.ran, runs, spec)
            first_bytes = plans[spec.name]["plan"]["least_vram_bytes"]
            least[spec.name] = least_bytes(is_enough, verdicts.of(spec), first_bytes)
    print("\n".join(report([spec for spec in specs if spec.name in least], plans, least)))


if __name__ == "__main__":
    main()
