"""Offline runs of W&B, read back with W&B's own command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspect(sync_command: str | None, *options: str) -> str:
    """What W&B's own reader finds in the last part of the run that the command would upload."""
    assert sync_command is not None
    folder, _, pattern = shlex.split(sync_command)[-1].rpartition("/")
    return inspect_part(max(Path(folder).glob(pattern), key=lambda run: run.stat().st_mtime_ns), *options)


def inspect_part(part: Path, *options: str) -> str:
    """What it finds in an `offline-run-*` folder."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(part)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def summary_of(part: Path) -> dict[str, Any]:
    """Name, config, summary and state."""
    return json.loads(inspect_part(part, "--summary", "--json"))


def records_of(part: Path) -> list[dict[str, Any]]:
    """Everything, in the order in which it was written."""
    return [json.loads(line) for line in inspect_part(part, "--json").splitlines()]
