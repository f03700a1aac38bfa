"""What the allocator of a CUDA device does in a few steps of training, action by action, for the planner's replay.

    scripts/python scripts/benchmarks/record_allocator_trace.py [FOLDER]

Leaves one compressed JSON per case in FOLDER (docs/results/<device>/allocator_traces), each from a process of its own,
and says whether the replay does the same to the byte. Some cases run once more, under the least limit at which, by the
replay, they fit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowvram.compat.torch_cuda import allocator_recorded, allocator_snapshot
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.config.identity import ROOT
from lowvram.config.registry import knob_of, neutral_options, node_of
from lowvram.config.schema import build
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.planning.memory.replay import needs_of
from lowvram.tasks import Auto, Problem
from scripts.benchmarks.recorded import Recording, Sample, actions_of, first_difference, load_recording

CUDA = torch.device("cuda", 0)  # of a device without a number torch sets no limit
NUM_STEPS = 2  # the first makes the optimizer's state
EXPANDABLE = "expandable_segments:True"
SPECS = {
    "transformer": DataSpec(Modality.TOKENS, 256, (128,)),
    "resnet": DataSpec(Modality.IMAGES, 42, (3, 64, 64)),
}


@dataclass(frozen=True)
class Case:
    """Some steps of one model."""

    model: str
    expandable: bool = False
    options: dict[str, str] = field(default_factory=dict)  # of knob groups; others are neutral
    batch_size: int = 32

    @property
    def point(self) -> str:
        options = {"model": self.model, **self.options, "allocator": "expandable" if self.expandable else "default"}
        words = [f"{group}={option}" for group, option in options.items()]
        return " ".join([*words, f"train.batch_size={self.batch_size}"])

    def problem(self) -> Problem:
        return Auto().pose(build(node_of("model", self.model), "model"), SPECS[self.model])

    def rig(self, device: torch.device) -> Rig:
        options = {**neutral_options(), **self.options}  # the environment chooses the allocator
        return assemble(self.problem(), {"=".join(option): knob_of(option) for option in options.items()}, device)

    def batch(self, device: torch.device) -> Part:
        spec = SPECS[self.model]
        shape, is_text = (self.batch_size, *spec.shape), spec.modality is Modality.TOKENS
        targets = torch.randint(spec.num_classes, shape if is_text else shape[:1], device=device)
        return Part(
            torch.randint_like(targets, spec.num_classes) if is_text else torch.rand(shape, device=device), targets
        )


def both_allocators(name: str, model: str, batch_size: int = 32, **options: str) -> dict[str, Case]:
    """A case with segments of one size each, and with expandable ones."""
    return {
        name: Case(model, False, options, batch_size),
        f"{name}_expandable": Case(model, True, options, batch_size),
    }


CASES = {
    **both_allocators("transformer", "transformer"),
    **both_allocators("transformer_bf16_every1", "transformer", precision="bf16", ckpt="every1"),
    **both_allocators("transformer_accum", "transformer", accum="x4"),
    **both_allocators("transformer_in_backward", "transformer", stepping="in_backward"),
    **both_allocators("transformer_cpu_offload", "transformer", stepping="cpu_offload"),
    **both_allocators("transformer_offload_activations", "transformer", offload="activations"),
    **both_allocators("transformer_offload_parameters", "transformer", offload="parameters"),
    **both_allocators("transformer_chunked", "transformer", logits="chunked", optimizer="adafactor"),
    **both_allocators("resnet", "resnet"),
    **both_allocators("resnet_bf16_every2_accum", "resnet", precision="bf16_pure", ckpt="every2", accum="x2"),
}
LIMITED = ["transformer", "transformer_bf16_every1_expandable", "transformer_accum", "transformer_offload_parameters"]


class Sampler(TorchDispatchMode):
    """Asks the allocator for its sums after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.samples.append(sample())
        return out


def sample() -> Sample:
    stats = torch.cuda.memory_stats_as_nested_dict(CUDA)
    allocation = stats["allocation"]["all"]
    return Sample(allocation["allocated"] + allocation["freed"], stats["allocated_bytes"]["all"]["current"])


@contextmanager
def recorded() -> Iterator[None]:
    """Inside it every action of the allocator is kept, without stacks."""
    with allocator_recorded(context=None, max_entries=10**6):
        yield


def record(case: Case, limit_bytes: int | None = None) -> Recording:
    """Run the case's steps. The process must not have used the device before, and its environment chooses the
    allocator."""
    device_bytes = torch.cuda.get_device_properties(CUDA).total_memory
    if limit_bytes is not None:
        # A fraction is rounded down to bytes; by everything below 2 MiB more the limit is the same.
        torch.cuda.set_per_process_memory_fraction((limit_bytes + 2**19) / device_bytes, CUDA)
    with recorded(), Sampler() as sampler:
        rig, batch = case.rig(CUDA), case.batch(CUDA)
        for _ in range(NUM_STEPS):
            step(rig, batch)
        torch.cuda.synchronize()
        last = sample()
        actions = actions_of(allocator_snapshot())
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    return Recording(
        point=case.point,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(CUDA),
        device_bytes=device_bytes,
        expandable=EXPANDABLE in os.environ.get("PYTORCH_ALLOC_CONF", ""),
        limit_bytes=limit_bytes,
        outside_bytes=device_bytes - free_bytes - torch.cuda.memory_reserved(CUDA),
        samples=[Sample(*each) for each in dict([*sampler.samples, last]).items()],  # the last word of each moment
        actions=actions,
    )


def record_apart(name: str, path: Path, limit_bytes: int | None = None) -> Recording:
    """Record a case in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")}
    environment["PYTORCH_ALLOC_CONF"] = EXPANDABLE if CASES[name].expandable else ""
    words = [sys.executable, __file__, str(path), name, *([] if limit_bytes is None else [str(limit_bytes)])]
    subprocess.run(words, check=True, env=environment)
    return load_recording(path)


def folder_of(device_name: str) -> Path:
    return ROOT / "docs" / "results" / re.sub(r"\W+", "_", device_name.lower()) / "allocator_traces"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit(
            "scripts/benchmarks/record_allocator_trace.py needs a CUDA device that torch can use, and there is none."
        )
    match sys.argv[1:]:
        case [path, name, *limit]:
            record(CASES[name], int(limit[0]) if limit else None).save(Path(path))
        case words:
            record_all(Path(words[0]) if words else folder_of(torch.cuda.get_device_name(CUDA)))


def record_all(folder: Path) -> None:
    for name, case in CASES.items():
        tell(name, recording := record_apart(name, folder / f"{name}.json.gz"))
        if name in LIMITED:
            limit_bytes = needs_of(recording.events(), expandable=case.expandable).least_limit_bytes
            tell(f"{name}_limited", record_apart(name, folder / f"{name}_limited.json.gz", limit_bytes))


def tell(name: str, recording: Recording) -> None:
    """Print whether the replay does the same."""
    difference = first_difference(recording)
    print(f"{name}: {len(recording.actions)} actions, {difference or 'replayed to the byte'}", flush=True)


if __name__ == "__main__":
    main()
