"""Sweeps that are typed again run what is missing, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lowvram.cli import job
from lowvram.launch.spec import Point
from lowvram.results.row import Row
from tests.calls import TINY, TINY_RESNET, Outcome, read_row
from tests.tiers import first_of

Call = Callable[..., Outcome]


def results(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every result.json of a sweep: name -> its bytes and when it was written."""
    files = {read_row(file.parent)["name"]: file for file in folder.glob("*/result.json")}
    return {name: (file.read_bytes(), file.stat().st_mtime_ns) for name, file in files.items()}


@pytest.mark.slow
def test_a_sweep_that_is_typed_again(call: Call, tmp_path: Path) -> None:
    """One point was killed. In another order and with another point, only these two run."""
    sweep = tmp_path / "sweep"
    words = ("-m", *TINY, f"hydra.sweep.dir={sweep}")
    first = call(*words, "train.steps=3", "precision=fp32,bf16", "seed=1,2", "name=2.kill")
    assert first.code == 1
    assert first.statuses == {"fp32-seed1": "ok", "fp32-seed2": "killed", "bf16-seed1": "ok", "bf16-seed2": "killed"}
    before = results(sweep)

    again = call(*words, "seed=2,1,3", "train.steps=3", "precision=fp32")
    assert again.code == 0, again.said()
    after = results(sweep)
    assert after["fp32-seed1"] == before["fp32-seed1"]
    assert {name: after[name] for name in before if name.startswith("bf16")} == {
        name: before[name] for name in before if name.startswith("bf16")
    }
    assert [line for line in again.out.splitlines() if ": started" in line] == [
        "planning: started, 3 points",
        "seed2: started, 3 steps",
        "seed3: started, 3 steps",
    ]
    assert len(list(sweep.glob("*/result.json"))) == 5

    third = call(*words, "train.steps=3", "precision=fp32", "seed=1,2,3")
    assert third.code == 0
    assert "started" not in third.out
    assert results(sweep) == after


@pytest.mark.slow
def test_points_are_the_same_whatever_does_not_change_them(call: Call, tmp_path: Path) -> None:
    """Logger, paths, time-out and name are no part of a point's identity; all else is."""
    words = ("-m", *TINY, f"hydra.sweep.dir={tmp_path}/sweep")
    assert call(*words, "seed=1").code == 0
    same = call(*words, "seed=1", "timeout_s=99", "name=other", "paths.outputs=elsewhere", "logger.project=mine")
    assert "started" not in same.out
    other = call(*words, "seed=1", "optimizer.lr=0.5")
    assert "started" in other.out
    assert len(list(tmp_path.glob("sweep/*/result.json"))) == 2


def test_out_of_memory_is_final_and_an_error_is_not(call: Call, tmp_path: Path) -> None:
    words = ("-m", *TINY, f"hydra.sweep.dir={tmp_path}/sweep", "seed=1,2")
    assert call(*words, "name=1.bad_alloc+2.raise").statuses == {"seed1": "oom", "seed2": "error"}
    again = call(*words)
    assert again.statuses == {"seed1": "oom", "seed2": "ok"}
    assert again.code == 0


@pytest.mark.slow
def test_a_sweep_under_a_cap(call: Call) -> None:
    """One option fits, the other doesn't."""
    large = ("train.batch_size=256", "data.sequence_length=64", "train.steps=1")
    outcome = call("-m", *TINY, *large, "accum=none,x32", "vram=24MiB")
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"none": "oom", "x32": "ok"}
    assert "try ckpt=every1 or accum=x8" in outcome.rows["none"]["reason"]
    assert {row["choices"]["allocator"] for row in outcome.rows.values()} == {"tight"}


def test_points_of_a_preset_are_named_by_what_differs(call: Call) -> None:
    outcome = call(*TINY, "sweep=optimizers", "measure.steps=1", "measure.warmup_steps=1", "seed=5")
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"adamw": "ok", "sgd": "ok"}


@pytest.mark.slow
def test_a_waterfall_ends_with_the_smallest_peak(call: Call) -> None:
    """Each knob is added to those before it, and none of them makes the peak larger."""
    shape = ("train.batch_size=32", "data.sequence_length=64", "model.num_layers=4")
    outcome = call(*TINY, *shape, "sweep=waterfall", "measure.steps=1", "measure.warmup_steps=1")
    assert outcome.code == 0, outcome.said()
    added = ["accum", "ckpt", "precision", "optimizer", "stepping", "logits", "offload"]
    assert list(outcome.statuses) == ["baseline", *(f"+{group}" for group in added)]
    peaks = [row["memory"]["peak_bytes"] for row in outcome.rows.values()]
    assert all(later <= earlier for earlier, later in pairwise(peaks)), peaks
    assert peaks[-1] < peaks[0] / 4
    changes = [set(row["choices"].items()) for row in outcome.rows.values()]
    assert all(len(later - earlier) == 1 for earlier, later in pairwise(changes))


@pytest.mark.parametrize(
    ("small", "sweep"),
    first_of(
        [
            (TINY, "batch_size"),
            (TINY, "one_at_a_time"),
            (TINY_RESNET, "one_at_a_time"),
            (TINY_RESNET, "waterfall"),
            ((*TINY, "model.num_layers=4"), "sharding"),  # pipelines have up to four stages
        ]
    ),
    ids=["transformer-batch", "transformer-one", "resnet-one", "resnet-waterfall", "transformer-ranks"],
)
@pytest.mark.slow
def test_every_point_of_a_preset_can_be_had(call: Call, small: tuple[str, ...], sweep: str) -> None:
    outcome = call(*small, f"sweep={sweep}", "mode=plan", "plan.device=rtx3060", "train.batch_size=32")
    assert outcome.code == 0, outcome.said()
    assert set(outcome.statuses.values()) == {"ok"}, outcome.statuses


@pytest.mark.parametrize("words", first_of([("sweep=optimizers", "mode=train"), (("-m", "optimizer=adamw,sgd"),)]))
def test_one_point_of_a_sweep_is_resumed_alone(call: Call, words: tuple[str, ...]) -> None:
    """In its own folder, under its own name; no sweep starts again, though its words ask for one."""
    outcome = call(*words, *TINY, "snapshot.every_steps=1", "name=kill")
    assert outcome.statuses == {"adamw": "killed", "sgd": "killed"}
    sgd = outcome.folders[1]
    again = call(f"resume={sgd}", "name=null")
    assert again.code == 0, again.said()
    assert again.statuses == {"adamw": "killed", "sgd": "ok"}
    row = read_row(sgd)
    assert (row["name"], row["index"], row["choices"]["optimizer"]) == ("sgd", 1, "sgd")


def test_a_bug_in_the_program_is_a_row_and_the_sweep_goes_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra keeps what a point's job raises to itself."""
    run_point = job.run_point

    def fail(point: Point, *about: Any) -> Row:
        if point.config["seed"] == 0:
            raise ZeroDivisionError("a bug")
        return run_point(point, *about)

    monkeypatch.setattr(job, "run_point", fail)
    outcome = call("-m", *TINY, "seed=0,1", "hydra.sweep.dir=sweep")
    assert (outcome.code, outcome.statuses) == (1, {"seed0": "error", "seed1": "ok"})
    assert read_row(outcome.folders[0])["reason"] == "ZeroDivisionError: a bug"
    said = outcome.said()
    assert said.index("Traceback") < said.index("ZeroDivisionError: a bug") < said.index("results: sweep")


def test_a_bug_whose_row_cant_be_written_either(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        monkeypatch.setattr(job.rows, "write", fail_too)
        raise ZeroDivisionError("a bug")

    def fail_too(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "result.json")

    monkeypatch.setattr(job, "run_point", fail)
    outcome = call("-m", *TINY, "seed=0,1")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "result.json: can't be written (Input/output error)"


def test_folders_may_be_named_by_the_points_numbers(call: Call) -> None:
    """Also where a sweep goes on with a few of its points, or checks only some of them first."""
    words = ("-m", *TINY, "train.steps=1", "hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.num}")
    outcome = call(*words, "seed=0,1", "hydra.sweeper.max_batch_size=1")
    assert outcome.code == 0, outcome.said()
    assert {folder.name: read_row(folder)["config"]["seed"] for folder in outcome.folders} == {"0": 0, "1": 1}


def test_a_bug_after_the_row_leaves_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(job.Job, "_tell_point", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        call("-m", *TINY, "seed=0", "hydra.sweep.dir=sweep")
    assert [read_row(path.parent)["status"] for path in Path("sweep").glob("*/result.json")] == ["ok"]
