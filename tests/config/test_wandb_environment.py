"""W&B's own variables name runs and groups where nothing is typed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode

from lowvram.cli import job
from lowvram.results.row import empty_row, merge


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The name and the group that a point has at its loggers."""
    monkeypatch.setattr(job, "output_folder", lambda: tmp_path / "sweep" / "point")

    def named(
        mode: RunMode = RunMode.RUN, before: str | None = None, group: str | None = None, **typed: Any
    ) -> tuple[str | None, str | None]:
        is_sweep = mode is RunMode.MULTIRUN
        about = SimpleNamespace(sweeper={"run": "seed1"} if is_sweep else {}, mode=mode)
        values = {"name": typed.get("name"), "logger": {"wandb": typed.get("wandb", True), "group": group}}
        row = merge(empty_row(), {"logged": {"name": before, "group": before}})
        found = job.logged(about, row, ["ckpt=every2"], values)
        return found["name"], found["group"]

    return named


def test_names_and_groups(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named() == ("every2", None)
    assert named(RunMode.MULTIRUN) == ("seed1", "sweep")
    monkeypatch.setenv("WANDB_NAME", "mine")
    monkeypatch.setenv("WANDB_RUN_GROUP", "ours")
    assert named() == ("mine", "ours")
    assert named(RunMode.MULTIRUN) == ("mine-seed1", "ours")
    assert named(name="typed", group="typed") == ("every2", "typed")
    assert named(before="earlier") == ("earlier", "earlier")
    assert named(wandb=False) == ("every2", None)
    monkeypatch.setenv("WANDB_NAME", " ")
    assert named() == ("every2", "ours")
