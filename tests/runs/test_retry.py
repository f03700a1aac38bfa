"""accum=auto: a point that runs out of memory begins again with twice the parts, until it fits; and its row says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowvram.launch.spec import with_chosen, with_parts, without_chosen
from lowvram.results.row import Row
from lowvram.runs.retry import as_left
from scripts.benchmarks.runs import Runs
from tests.calls import TINY, Outcome, history, read_row
from tests.offline import records_of
from tests.refusals import refusal
from tests.tiers import first_of
from tests.worker.test_ranks import torchrun

Call = Callable[..., Outcome]
LARGE = (*TINY, "train.batch_size=64", "data.sequence_length=128", "device=cpu", "vram=24MiB")
AUTO, STEPS = "accum=auto", ("train.steps=6", "train.eval_every=2", "snapshot.every_steps=1")
OUT_OF_MEMORY = "name=out_of_memory@4"  # each attempt makes three steps


def tried(row: Row) -> list[int]:
    """The parts of the attempts before the last one."""
    assert all(attempt["status"] == "oom" for attempt in row["attempts"] or ())
    return [attempt["parts"] for attempt in row["attempts"] or ()]


def logged(folder: Path, name: str = "loss/train") -> dict[int, float]:
    """step -> value; each step is there once."""
    lines = [(line["step"], line[name]) for line in history(folder) if name in line]
    assert len(lines) == len(dict(lines))
    return dict(lines)


@pytest.fixture
def one_core() -> Iterator[None]:
    """For calls whose losses under `vram` must be equal to the last bit. On several cores MKL takes memory for buffers
    at every new shape, and where the limit refuses it, it multiplies without and rounds otherwise. On one core it has
    all that it needs here before the limit is set."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("mode", first_of(["train", "measure"]))
def test_a_point_grows_until_it_fits(call: Call, mode: str) -> None:
    """For real: under a cap. It ends as with that number from the start."""
    words = (*LARGE, f"mode={mode}", "measure.warmup_steps=1", "measure.steps=2")
    outcome = call(*words, AUTO)
    assert outcome.code == 0, outcome.said()
    row = outcome.row
    parts = row["config"]["accum"]["parts"]
    assert parts > 1
    assert tried(row) == [number for number in (1, 2, 4, 8, 16, 32) if number < parts]
    assert all("out of memory in the " in attempt["reason"] for attempt in row["attempts"])
    assert row["choices"]["accum"] == "auto"
    assert row["plan"]["allocated_bytes"] == pytest.approx(row["memory"]["peak_bytes"], rel=0.01)  # of these parts
    assert "out of memory with accum.parts=1: again with 2\n" in outcome.out
    assert f"\nparts: accum.parts={parts}, after running out of memory with 1" in outcome.out

    fixed = call(*words, f"accum=x{parts}", "hydra.run.dir=outputs/fixed")
    assert fixed.code == 0, fixed.said()
    assert fixed.row["attempts"] is None
    assert fixed.row["loss"] == row["loss"]
    assert history(fixed.folder) == history(outcome.folder)
    assert fixed.row["memory"]["peak_bytes"] == row["memory"]["peak_bytes"]


def test_what_fits_at_once_is_one_attempt(call: Call) -> None:
    outcome = call(*TINY, AUTO)
    assert outcome.row["status"] == "ok"
    assert outcome.row["attempts"] is None
    assert outcome.row["config"]["accum"]["parts"] == 1
    assert "parts" not in outcome.out


def test_an_option_with_a_fixed_number_does_not_grow(call: Call) -> None:
    outcome = call(*TINY, "accum=x2", OUT_OF_MEMORY.replace("@4", "@2"))
    assert outcome.row["status"] == "oom"
    assert outcome.row["attempts"] is None


def test_nothing_fits(call: Call) -> None:
    """The row is that of the last attempt, with its advice, and without a word on what cannot be had."""
    outcome = call(*TINY, AUTO, "name=out_of_memory@1")  # of each attempt: after a whole step it would go on from there
    assert outcome.code == 1
    row = outcome.row
    assert row["status"] == "oom"
    assert tried(row) == [1, 2]
    assert row["config"]["accum"]["parts"] == 4  # of one sample each
    assert " % of the peak: try " in row["reason"]
    assert "accum" not in row["reason"]
    assert not logged(outcome.folder)
    assert "parts: accum.parts=4, after running out of memory with 1, 2\n" in outcome.out


def test_what_parts_cannot_help_is_tried_once(call: Call) -> None:
    """The weights alone don't fit."""
    outcome = call(*TINY, AUTO, "device=cpu", "vram=1MiB", "model.width=512", "model.num_layers=8")
    assert outcome.row["status"] == "oom"
    assert outcome.row["attempts"] is None
    assert outcome.row["config"]["accum"]["parts"] == 1


@pytest.mark.parametrize("fault", first_of(["out_of_memory", "bad_alloc"]))
def test_a_snapshot_is_gone_on_with(call: Call, fault: str) -> None:
    """Also after a death that left no time to speak; every step is there once."""
    whole = call(*TINY, *STEPS, "accum=x2", "hydra.run.dir=outputs/whole")
    outcome = call(*TINY, *STEPS, AUTO, f"name={fault}@4")
    assert outcome.code == 0, outcome.said()
    assert tried(outcome.row) == [1]
    assert outcome.row["config"]["accum"]["parts"] == 2
    assert "continuing from" in outcome.out
    for name in ("loss/train", "loss/eval"):
        ours, theirs = logged(outcome.folder, name), logged(whole.folder, name)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_several_ranks_grow(call: Call) -> None:
    """One of them runs out of memory; each has two samples."""
    words = (*TINY, *STEPS, "sharding=ddp", "sharding.ranks=2", "device=cpu")
    outcome = call(*words, AUTO, "name=out_of_memory@4.1")
    assert outcome.code == 0, outcome.said()
    assert tried(outcome.row) == [1]
    assert outcome.row["attempts"][0]["reason"].startswith("rank 1: out of memory")
    assert outcome.row["config"]["accum"]["parts"] == 2
    assert set(logged(outcome.folder)) == set(range(1, 7))


@pytest.mark.slow
def test_under_torchrun_the_row_says_what_to_type(tmp_path: Path) -> None:
    """Its ranks can't be started anew."""
    (tmp_path / "torchrun").mkdir()
    outcome = torchrun(AUTO, "name=out_of_memory@2", cwd=tmp_path / "torchrun")
    assert outcome.code == 1
    assert outcome.row["status"] == "oom"
    assert outcome.row["reason"].endswith(
        "a process that ran out of memory can't begin again with more parts: type accum.parts=2"
    )
    assert outcome.row["attempts"] is None


@pytest.mark.slow
def test_ctrl_c_between_two_attempts(call: Call) -> None:
    """The run goes on in the parts that were due next."""
    outcome = call(*TINY, *STEPS, AUTO, "name=stop_and_out_of_memory@4")
    assert outcome.code == 75, outcome.said()
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == "stopped after running out of memory with accum.parts=1"
    assert "again with" not in outcome.out
    again = call(*outcome.command("continue with"), "name=null")
    assert again.code == 0, again.said()
    assert again.row["config"]["accum"]["parts"] == 2
    assert tried(again.row) == [1]
    assert set(logged(again.folder)) == set(range(1, 7))


@pytest.mark.slow
def test_what_is_typed_beside_resume_wins(call: Call) -> None:
    grown = call(*TINY, *STEPS, AUTO, OUT_OF_MEMORY)
    for words, parts in {"train.steps=7": 2, "accum=none": 1}.items():
        folder = shutil.copytree(grown.folder, grown.folder.parent / words)
        again = call(f'resume="{folder}"', "name=null", "train.steps=7", words)
        assert again.code == 0, again.said()
        row = read_row(Path(folder))  # not that of the newest folder: copies are as old as what they were made from
        assert row["config"]["accum"]["parts"] == parts
        assert tried(row) == ([1] if parts == 2 else [])


def test_a_run_has_the_parts_that_it_had_grown_to() -> None:
    """Unless nothing had fitted, or something else was typed for what shares out the batch."""
    config = {"train": {"batch_size": 8, "steps": 3}, "sharding": {"ranks": 1}, "accum": {"parts": 1}}
    attempts = [{"parts": 1, "status": "oom", "reason": "why"}]
    left = {"config": with_parts(config, 2), "attempts": attempts, "status": "killed"}
    longer = {**config, "train": {"batch_size": 8, "steps": 4}}
    assert as_left(config, left) == (with_parts(config, 2), attempts)
    assert as_left(longer, left) == (with_parts(longer, 2), attempts)
    for other in ({"accum": {"parts": 4}}, {"train": {"batch_size": 2, "steps": 3}}, {"sharding": {"ranks": 2}}):
        assert as_left({**config, **other}, left) == ({**config, **other}, None)
    for earlier in (None, {**left, "attempts": None}, {**left, "status": "oom"}):
        assert as_left(config, earlier) == (config, None)


@pytest.mark.slow
def test_time_is_that_of_all_attempts(call: Call) -> None:
    outcome = call(*TINY, "train.steps=900", AUTO, "name=out_of_memory@6+slow@1", "timeout_s=2")
    assert outcome.row["status"] == "timeout", outcome.row["reason"]
    assert outcome.row["reason"] == "still running after timeout_s=2"


@pytest.mark.slow
def test_a_sweep_and_its_table(call: Call) -> None:
    """Each point grows by itself, keeps its place, and is final."""
    words = ("-m", *TINY, AUTO, "seed=1,2", "name=2.out_of_memory@1", "hydra.sweep.dir=outputs/sweep")
    outcome = call(*words)
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"seed1": "ok", "seed2": "oom"}
    note = "seed2: accum.parts=4, after running out of memory with 1, 2"
    assert note in outcome.out
    assert note in (outcome.cwd / "outputs" / "sweep" / "table.md").read_text().replace("\\", "")
    assert "started" not in call(*words).out


@pytest.mark.slow
def test_there_is_one_run_in_wandb(call: Call) -> None:
    """Of as many parts as processes. Its configuration has the number that fitted, and no step is there twice."""
    outcome = call(*TINY, *STEPS, AUTO, OUT_OF_MEMORY, "logger=wandb")
    assert outcome.code == 0, outcome.said()
    parts = sorted(outcome.folder.glob("wandb/offline-run-*"), key=lambda part: part.stat().st_mtime_ns)
    assert parts, outcome.said()
    first, last = map(records_of, parts)
    assert len({record["run"]["run_id"] for record in (*first, *last) if record["type"] == "run"}) == 1
    told = [record["config"]["update"]["accum"]["parts"] for record in last if record["type"] == "config"]
    assert told[-1] == 2
    items = [record["history"]["item"] for record in (*first, *last) if record["type"] == "history"]
    assert [item["step"] for item in items if "loss/train" in item] == list(range(1, 7))


@pytest.mark.slow
def test_points_run_from_python_grow(tmp_path: Path) -> None:
    with Runs(tmp_path / "points") as runs:
        row = runs.run("auto", [*LARGE, AUTO, "train.steps=1"])
    assert row["status"] == "ok"
    assert tried(row)


def test_more_parts_than_samples_are_refused() -> None:
    sentence = refusal(*TINY, AUTO, "accum.parts=33", "train.batch_size=32")
    allowed = "at least accum.parts=33, a sample for each part: choose fewer parts or ranks, or a larger batch"
    assert sentence == f"train.batch_size=32: must be {allowed}"
    assert refusal(*TINY, AUTO, "accum.parts=0") == "accum.parts=0: must be at least 1"


def test_more_parts_get_a_plan_with_a_choice_of_its_own() -> None:
    """ckpt=auto: blocks that a plan has chosen for one number of parts aren't those of another. Typed ones stay."""
    config, plan = {"ckpt": {"blocks": None, "other": 1}, "seed": 0}, {"chosen": {"ckpt": {"blocks": [0, 1]}}}
    chosen = with_chosen(config, plan)
    assert chosen == {"ckpt": {"blocks": [0, 1], "other": 1}, "seed": 0}
    assert without_chosen(chosen, plan) == config
    for nothing in (None, {}, {"reason": "no plan"}):
        assert without_chosen(chosen, nothing) == with_chosen(chosen, nothing) == chosen
