"""What a session needs, without a process around it: samples that were drawn once, and a parent that listens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowvram.config.settings import (
    EvalSettings,
    MeasureSettings,
    PlanSettings,
    RootSettings,
    SearchSettings,
    Settings,
    SnapshotSettings,
    SolveSettings,
    TrainSettings,
)
from lowvram.config.transforms import (
    ExportedWeights,
    ExportFormat,
    ExportSettings,
    GrowSettings,
    GrowthKind,
    ImportanceKind,
    PruneSettings,
)
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.data.batch_sizes import SameSize
from lowvram.data.loader import Inline
from lowvram.data.source import Data, Samples
from lowvram.data.spec import DataSpec
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.profiling.malloc import allocated_bytes
from lowvram.loops.schedule import Constant, Schedule
from lowvram.loops.session import Session
from lowvram.loops.skipping import skips_of
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

BATCH_SIZE = 4
TRAIN: dict[str, Any] = {
    "batch_size": BATCH_SIZE,
    "steps": 6,
    "epochs": None,
    "eval_every": None,
    "log_every": 1,
    "noise_scale": False,
    "rehearse": False,
}


class Drawn(Samples):
    """Random samples, some of whose targets don't count."""

    def __init__(self, spec: DataSpec, num_samples: int) -> None:
        self.batch = make_batch(spec, num_samples)

    def __len__(self) -> int:
        return self.batch.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        return self.batch.inputs[index], self.batch.targets[index]


@dataclass
class Told:
    """What a mode tells its parent, and a parent that may ask it to stop."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stop_at: int | None = None  # the step after which to stop
    requested: bool = False
    is_heard: bool = True  # the parent is there

    def __call__(self, event: str, **fields: Any) -> bool:
        self.events.append((event, fields))
        self.requested = self.requested or (event == "metrics" and fields["step"] == self.stop_at)
        return self.is_heard

    @contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        yield

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every metric of this name."""
        metrics = [fields for event, fields in self.events if event == "metrics"]
        return [(fields["step"], fields["values"][name]) for fields in metrics if name in fields["values"]]


MEASURE = MeasureSettings(
    warmup_steps=1, steps=3, max_seconds=60.0, largest_tensors=False, fidelity=False, fidelity_steps=3, reruns=0
)

PRUNE = PruneSettings(run=None, ratio=0.5, importance=ImportanceKind.magnitude, batches=2, round_to=4)
GROW = GrowSettings(run=None, factor=2, how=GrowthKind.stack)


def session_in(
    folder: Path,
    problem: str | Problem = "transformer",
    *,
    choices: dict[str, str | Knob] | None = None,
    schedule: Schedule | None = None,
    told: Told | None = None,
    is_resumed: bool = False,
    snapshot_every: int | None = None,
    sharded_above_gib: float | None = None,
    merge: bool = False,
    export: ExportFormat = ExportFormat.safetensors,
    metrics: list[str] | None = None,
    best: str | None = None,
    export_of: ExportedWeights = ExportedWeights.last,
    prune: PruneSettings = PRUNE,
    grow: GrowSettings = GROW,
    **train: Any,
) -> Session:
    """A session of a tiny model over samples that are drawn once. Keywords: fields of `train`; `choices` of knobs."""
    task = PROBLEMS[problem] if isinstance(problem, str) else problem
    knobs = knobs_of(**(choices or {}))
    groups = {name.partition("=")[0]: knob for name, knob in knobs.items()}
    settings = Settings(
        root=RootSettings(0, "cpu", vram=None, timeout_s=None, resume=None, name=None, process="child", callbacks=None),
        train=TrainSettings(**{**TRAIN, **train}),
        eval=EvalSettings(metrics=metrics),
        measure=MEASURE,
        plan=PlanSettings(device="auto", host=None, margin=0.1, skip=False),
        search=SearchSettings(groups=None, lossy=False, probes=3),
        solve=SolveSettings(key=None, multiple_of=1),
        prune=prune,
        grow=grow,
        snapshot=SnapshotSettings(snapshot_every, 2, sharded_above_gib, best),
        export=ExportSettings(merge=merge, format=export, of=export_of),
        groups={**groups, "loader": Inline(), "schedule": schedule or Constant(), "model": task.model, "task": Auto()},
    )
    noise = noise_of(settings.train)
    skips = skips_of(settings.train)
    knobs |= {**noise.knobs(), **skips.knobs()}
    rig = assemble(task, knobs, CPU)
    torch.manual_seed(0)
    data = Data(task.spec, Drawn(task.spec, 15), Drawn(task.spec, 10), "drawn")
    folder.mkdir(parents=True, exist_ok=True)
    told = told or Told()
    about = (is_resumed, time.monotonic(), 0, allocated_bytes())
    sizes = SameSize(settings.train.batch_size)
    return Session(settings, knobs, task, rig, data, sizes, told, told, folder, *about, noise=noise, skips=skips)
