"""Sessions without a parent: tiny models, samples drawn once, events kept in a list."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.core.knob import Knob
from lowvram.core.rig import assemble
from lowvram.data.loader import Inline
from lowvram.data.source import Data
from lowvram.modes.session import Session
from lowvram.schedule import Constant, Schedule
from lowvram.settings import MeasureSettings, RootSettings, Settings, SnapshotSettings, TrainSettings
from tests.laboratory import CPU, PROBLEMS, knobs_of
from tests.modes.sessions import Drawn, Told

BATCH_SIZE = 4


@pytest.fixture
def make_session(tmp_path: Path) -> Callable[..., Session]:
    """Makes sessions that share a folder. Keywords: fields of `train`, and `choices` of knobs."""

    def make(
        problem: str = "transformer",
        *,
        choices: dict[str, str | Knob] | None = None,
        schedule: Schedule | None = None,
        told: Told | None = None,
        is_resumed: bool = False,
        snapshot_every: int | None = None,
        **train: Any,
    ) -> Session:
        task, knobs = PROBLEMS[problem], knobs_of(**(choices or {}))
        groups = {name.partition("=")[0]: knob for name, knob in knobs.items()}
        settings = Settings(
            root=RootSettings(seed=0, device="cpu", vram=None, timeout_s=None, resume=None, name=None),
            train=TrainSettings(**{"batch_size": BATCH_SIZE, "steps": 6, "eval_every": None, "log_every": 1, **train}),
            measure=MeasureSettings(warmup_steps=1, steps=3, max_seconds=60.0),
            snapshot=SnapshotSettings(every_steps=snapshot_every, keep=2),
            groups={**groups, "loader": Inline(), "schedule": schedule or Constant(), "model": task.model},
        )
        rig = assemble(task, knobs, CPU)
        torch.manual_seed(0)
        data = Data(task.spec, Drawn(task.spec, 15), Drawn(task.spec, 10), "drawn")
        told = told or Told()
        return Session(settings, knobs, task, rig, data, told, told, tmp_path, is_resumed, time.monotonic(), 0)

    return make
