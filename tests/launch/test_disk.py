"""No room, no permission, nobody who listens: a clean end, and the points after it run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.calls import TINY, Outcome, Running

Call = Callable[..., Outcome]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_snapshot_that_finds_no_room(call: Call, small_disk: Path) -> None:
    """The point is an error, the next one has the room that the first one gave back."""
    outcome = call("-m", *TINY, f"paths.outputs={small_disk}", "model.width=256,32")
    assert outcome.code == 1, outcome.said()
    assert outcome.statuses == {"width256": "error", "width32": "ok"}
    assert outcome.rows["width256"]["reason"] == "the disk is full, in saving a snapshot"
    assert not list(small_disk.glob("**/*.tmp"))


def test_the_disk_is_full_before_the_run(call: Call, small_disk: Path) -> None:
    fill(small_disk)
    outcome = call(*TINY, f"paths.outputs={small_disk}")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "can't be written (No space left on device)" in outcome.err


def test_the_disk_fills_while_a_point_runs(call: Call, small_disk: Path) -> None:
    """Nothing can be written any more, so the row is told."""
    outcome = call(*TINY, f"paths.outputs={small_disk}", "name=fill_disk", "train.steps=200")
    assert outcome.code == 1
    assert "error: No space left on device while writing" in outcome.out
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("free_kib", [44, 24, 4])
def test_what_a_teacher_says_finds_no_room(call: Call, small_disk: Path, tmp_path: Path, free_kib: int) -> None:
    """One sentence, wherever the room ends: in a shard, in the index or in what is written beside them."""
    assert call(*TINY, f"hydra.run.dir={tmp_path}/teacher").code == 0
    run = small_disk / "run"
    words = (*TINY, "mode=teach", "task=distill", f"task.teacher={tmp_path}/teacher", "task.top=16", "train.steps=64")
    fill(small_disk)
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - free_kib * 2**10)
    outcome = call(*words, f"hydra.run.dir={run}")
    assert outcome.code == 1, outcome.said()
    assert "Traceback" not in outcome.said()
    assert re.search("the disk is full|No space left", outcome.said()), outcome.said()
    assert outcome.row["status"] == "error" if (run / "result.json").is_file() else True


@pytest.mark.slow
def test_activations_that_find_no_room(call: Call, small_disk: Path) -> None:
    """offload=activations_disk: the reason names the folder, and no file is left."""
    outcome = call(*TINY, "offload=activations_disk", f"offload.folder={small_disk}", "train.batch_size=512")
    assert outcome.code == 1, outcome.said()
    assert outcome.row["status"] == "error"
    assert outcome.row["reason"] == f"the disk is full, in the forward pass: {small_disk}"
    assert not list(small_disk.iterdir())
    assert call(*TINY, "offload=activations_disk", f"offload.folder={small_disk}").row["status"] == "ok"


def fill(folder: Path) -> None:
    """To the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass


@pytest.mark.slow
def test_nobody_reads_on(start: Callable[..., Running]) -> None:
    """`python train.py | head -1`: the run goes on, and its row is kept."""
    call = start(*TINY)
    call.wait_for("data: ")
    assert call.process.stdout is not None
    call.process.stdout.close()
    outcome = call.end()
    assert outcome.code == 0, outcome.said()
    assert outcome.err == ""
    assert outcome.row["status"] == "ok"
    call.wait_until_gone(1)
