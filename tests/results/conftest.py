"""W&B without an account."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def without_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a key, no network wanted, and W&B as it is in a new process; the point's folder."""
    import wandb

    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # of the process that has ended: it mustn't come back after the test
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home/netrc"))
    monkeypatch.setattr(sys, "argv", ["train.py", "data.hf_token=hunter2"])
    folder = tmp_path / "a point"
    folder.mkdir()
    yield folder
    wandb.teardown()
