"""A run that was ended goes on as if nothing had happened: to the last digit, in the same folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.cli.resume import is_of_another_option
from tests.calls import TINY, TINY_RESNET, Outcome, history, read_row
from tests.tiers import first_of

Call = Callable[..., Outcome]
STEPS = ("train.steps=7", "train.eval_every=2", "snapshot.every_steps=2", "schedule=cosine", "seed=3")

CASES = {
    "transformer, accum": (*TINY, "accum=x4"),
    "transformer, bf16, sgd": (*TINY, "precision=bf16", "optimizer=sgd"),
    "transformer, fp16, scale that overflows": (*TINY, "precision=fp16", "precision.init_scale=2e9"),
    "transformer, dropout, ckpt": (*TINY, "model.dropout=0.2", "ckpt=every1"),
    "transformer, workers, clip": (*TINY, "loader=workers", "stepping.clip=0.5"),
    "transformer, in_backward, clip, accum": (*TINY, "stepping=in_backward", "stepping.clip=0.5", "accum=x2"),
    "resnet, batch norm": TINY_RESNET,
    "resnet, bf16, accum": (*TINY_RESNET, "precision=bf16", "accum=x4"),
    "resnet, cpu_offload": (*TINY_RESNET, "stepping=cpu_offload", "stepping.offload_fraction=0.7"),
}


@pytest.mark.parametrize("case", first_of(list(CASES)))
def test_a_killed_run_goes_on_to_the_last_digit(call: Call, tmp_path: Path, case: str) -> None:
    """Killed before step 6, so step 5 is logged but not in a snapshot."""
    words = (*CASES[case], *STEPS)
    whole = call(*words, "hydra.run.dir=outputs/whole")
    assert whole.code == 0, whole.said()
    killed = call(*words, "hydra.run.dir=outputs/killed", "name=kill@6")
    assert killed.row["status"] == "killed"
    assert history(tmp_path / "outputs" / "killed")[-1]["step"] == 5

    resumed = call("resume=last", "name=null")
    assert resumed.code == 0, resumed.said()
    assert "continuing from" in resumed.out
    assert "step_00000004" in resumed.out
    assert history(tmp_path / "outputs" / "killed") == history(tmp_path / "outputs" / "whole")
    ours, theirs = read_row(tmp_path / "outputs" / "killed"), read_row(tmp_path / "outputs" / "whole")
    assert ours["status"] == "ok"
    for part in ("loss", "eval", "precision", "id"):
        assert ours[part] == theirs[part]
    assert len(list(tmp_path.glob("**/result.json"))) == 2
    weights = [(tmp_path / "outputs" / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.fixture
def interrupted(call: Call, tmp_path: Path) -> Path:
    """A run of 5 steps of which 4 were made, with the snapshots of steps 3 and 4."""
    outcome = call(*TINY, "train.steps=5", "snapshot.every_steps=1", "name=term@4", "hydra.run.dir=outputs/run")
    assert outcome.code == 75
    assert [line["step"] for line in history(tmp_path / "outputs" / "run")] == [1, 2, 3, 4]
    return tmp_path / "outputs" / "run"


def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(call: Call, interrupted: Path) -> None:
    whole = call(*TINY, "train.steps=5", "hydra.run.dir=outputs/whole")
    newest = max(interrupted.glob("snapshots/step_*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = call(f"resume={interrupted}", "name=null")
    assert resumed.code == 0, resumed.said()
    assert f"{newest} is damaged" in resumed.out
    assert f"continuing from {interrupted}/snapshots/step_00000003" in resumed.out
    assert history(interrupted) == history(whole.folder)


def test_a_torn_last_line_of_the_metrics_goes(call: Call, interrupted: Path) -> None:
    with (interrupted / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss/tra')
    assert call("resume=last", "name=null").code == 0
    assert [line["step"] for line in history(interrupted) if "loss/train" in line] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_words_beside_resume_win(call: Call, interrupted: Path) -> None:
    """And stay for the next time."""
    resumed = call("train.steps=6", "resume=last", "optimizer.lr=0.5", "name=term@1")
    assert resumed.code == 75, resumed.said()
    assert resumed.row["reason"] == "stopped after step 5 of 6"
    assert history(interrupted)[-1]["lr"] == 0.5
    assert history(interrupted)[-2]["lr"] == 0.001
    again = call(*resumed.command("continue with"), "name=null")
    assert again.row["config"]["train"]["steps"] == 6
    assert again.row["config"]["optimizer"]["lr"] == 0.5
    assert again.row["status"] == "ok"


@pytest.mark.slow
def test_a_refused_continuation_changes_nothing(call: Call, interrupted: Path) -> None:
    """Neither the files of the run nor what the next resume takes from it."""
    before = {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()}
    for mistake in (
        "optimizer.lr=nan",
        "precision=bf61",
        "vram=8",
        "paths.outputs=null",
        "train.batch_size=1 accum=x2",
    ):
        assert mistake.partition("=")[0].partition(" ")[0] in call("resume=last", *mistake.split()).sentence
        assert {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()} == before
    assert call("resume=last", "name=null").code == 0


# What a snapshot doesn't fit -> the sentence about it.
MISFITS = {
    "model.width=64": "model.width=64: must be 32 (",
    "model.num_layers=2 model.dropout=0.5 accum=x2": "model.num_layers=2: must be 1; model.dropout=0.5: must be 0.0 (",
    "optimizer=sgd optimizer.lr=0.5": "optimizer=sgd: must be adamw (",
    "optimizer=adafactor": "optimizer=adafactor: must be adamw (",
    "optimizer=adamw_8bit": "optimizer=adamw_8bit: must be adamw (",
    "optimizer.moments=bf16": "optimizer.moments=bf16: must be fp32 (",
    "stepping=in_backward": "stepping=in_backward: must be after_backward (",
    "precision=fp16": "precision=fp16: must be fp32 (",
    "mode=measure": "mode='measure': must be train",
}


@pytest.mark.slow
def test_what_a_snapshot_does_not_fit_is_refused(call: Call, interrupted: Path) -> None:
    """And nothing of the run is lost."""
    before = {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()}
    for words, expected in MISFITS.items():
        assert call("resume=last", *words.split()).sentence.startswith(expected)
        assert {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()} == before
    assert call("resume=last", "name=null", "precision=bf16", "ckpt=every1", "model.dropout=0.5").code == 0


@pytest.mark.slow  # another process of test_a_finished_run_can_be_made_longer
def test_a_finished_run_keeps_the_zeros_that_it_was_trained_with(call: Call) -> None:
    """Another option of sparsity is refused, whether or not it knows the fields that were typed for the run."""
    run = call(*TINY, "sparsity=rigl", "sparsity.drop=0.2", "hydra.run.dir=run")
    assert run.code == 0, run.said()
    before = {file: file.read_bytes() for file in run.folder.glob("**/*") if file.is_file()}
    for option in ("magnitude", "none"):
        sentence = (
            f"sparsity={option}: must be rigl, with which this run was trained: leave sparsity out beside resume="
        )
        assert call("resume=run", f"sparsity={option}", "train.steps=4").sentence == sentence
        assert {file: file.read_bytes() for file in run.folder.glob("**/*") if file.is_file()} == before


def test_fields_that_the_option_typed_does_not_have_stay_behind() -> None:
    typed = ["ckpt=none", "optimizer=sgd", "train.steps=4"]
    words = {
        "ckpt.every=3": True,
        "+ckpt.every=3": True,
        "ckpt=every2": False,  # of which the new one takes the place
        "optimizer.lr=0.1": False,
        "optimizer.betas=[0.9,0.99]": True,
        "train.batch_size=8": False,
        "stepping.clip=1": False,
        "sparsity.share=0.2": False,
    }
    assert {word: is_of_another_option(word, typed) for word in words} == words
    assert not is_of_another_option("ckpt.every=3", ["ckpt=every4"])
    assert not is_of_another_option("ckpt.every=3", ["ckpt=evry4"])  # that is refused
    assert not is_of_another_option("ckpt.every=3", [])


@pytest.mark.slow
def test_nothing_but_damaged_snapshots(call: Call, interrupted: Path) -> None:
    """The run is not started again unasked; without resume= it is."""
    for path in interrupted.glob("snapshots/step_*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    (interrupted / "result.json").unlink()  # as after `kill -9`
    before = {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()}
    sentence = call(f"resume={interrupted}").sentence
    assert sentence.startswith(f"resume='{interrupted}': must be a run with a sound snapshot: all 2")
    assert "start again without resume=" in sentence
    assert {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()} == before


def test_a_run_is_not_continued_unasked(call: Call, interrupted: Path) -> None:
    """The same command, or another one, in the folder of a run: nothing in it changes."""
    before = {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()}
    words = (*TINY, "train.steps=5", "hydra.run.dir=outputs/run")
    refused = "hydra.run.dir='outputs/run': must be a folder that holds no run yet"
    for more in ((), ("model.width=64",)):
        assert call(*words, *more).sentence == f"{refused}; resume=outputs/run goes on with this one"
        assert {file: file.read_bytes() for file in interrupted.glob("**/*") if file.is_file()} == before
    shutil.rmtree(interrupted / "snapshots")
    assert call(*words).sentence == refused
    assert (interrupted / "result.json").read_bytes() == before[interrupted / "result.json"]


@pytest.mark.slow
def test_a_sweep_of_one_point_goes_on_with_the_same_words(call: Call, tmp_path: Path) -> None:
    """What a scheduler may start again and again: a run that its time limit cuts off, until it is finished."""
    words = ("-m", *TINY, "train.steps=5", "snapshot.every_steps=1", "hydra.sweep.dir=outputs/job")
    assert call(*words, "name=term@4").code == 75
    finished = call(*words)
    assert finished.code == 0, finished.said()
    assert "continuing from" in finished.out
    assert [line["step"] for line in history(finished.folder) if "loss/train" in line] == [1, 2, 3, 4, 5]
    assert call(*words).code == 0


def test_the_newest_unfinished_run_is_the_last(call: Call, interrupted: Path) -> None:
    """Not a finished one, not one without a snapshot; and only below the outputs folder."""
    moved = interrupted.parents[1] / "out=puts" / "run"
    moved.parent.mkdir()
    shutil.move(interrupted, moved)
    assert call(*TINY, 'paths.outputs="out=puts"', "seed=1").code == 0
    assert call(*TINY, 'paths.outputs="out=puts"', "seed=2", "name=kill").code == 1
    assert "no unfinished run below outputs" in call("resume=last").sentence
    resumed = call("resume=last", 'paths.outputs="out=puts"', "name=null")
    assert resumed.code == 0, resumed.said()
    assert read_row(moved)["status"] == "ok"
    assert "no unfinished run below out=puts" in call("resume=last", 'paths.outputs="out=puts"').sentence


def test_nothing_to_resume(call: Call, interrupted: Path) -> None:
    assert "resume='nope': must be last or the folder" in call("resume=nope").sentence
    shutil.rmtree(interrupted / "snapshots")
    assert f"resume='{interrupted}': must be last or the folder" in call(f"resume={interrupted}").sentence


def test_without_its_words_a_run_cannot_be_resumed(call: Call, interrupted: Path) -> None:
    (interrupted / ".hydra" / "overrides.yaml").unlink()
    assert "overrides.yaml is missing" in call(f"resume={interrupted}").sentence


def test_a_finished_run_can_be_made_longer(call: Call, tmp_path: Path) -> None:
    assert call(*TINY, "train.steps=2", "hydra.run.dir=outputs/run").code == 0
    longer = call(f"resume={tmp_path}/outputs/run", "train.steps=4")
    assert longer.code == 0, longer.said()
    assert [line["step"] for line in history(tmp_path / "outputs" / "run") if "loss/train" in line] == [1, 2, 3, 4]


def test_other_values_than_those_of_the_snapshot_are_reported(call: Call, interrupted: Path) -> None:
    """Whether they were typed or somebody has changed what was noted."""
    noted = interrupted / ".hydra" / "overrides.yaml"
    noted.write_text(noted.read_text().replace("train.steps=5", "train.steps=6"))
    resumed = call("resume=last", "optimizer.lr=0.5", "seed=3", "name=null")
    assert resumed.code == 0, resumed.said()
    assert resumed.out.count("/.hydra/overrides.yaml was changed since the run wrote it") == 1
    told = "seed=3 (0 in the snapshot), train.steps=6 (5 in the snapshot), optimizer.lr=0.5 (0.001 in the snapshot)"
    (line,) = [line for line in resumed.out.splitlines() if line.startswith("going on with other values: ")]
    assert set(line.partition(": ")[2].split(", ")) == set(told.split(", "))
    again = call(f"resume={interrupted}", "train.steps=7")
    assert "was changed since" not in again.out
    assert "going on with other values: train.steps=7 (6 in the snapshot)\n" in again.out


def test_words_that_cannot_be_read_are_refused(call: Call, interrupted: Path) -> None:
    for text in (b"\xff\xfe\x00", b"- [", b"a: b", b"- 5\n- {a: b}\n", b""):
        (interrupted / ".hydra" / "overrides.yaml").write_bytes(text)
        sentence = call("resume=last").sentence
        assert sentence.startswith(f"resume='{interrupted.relative_to(interrupted.parents[1])}': must be"), text
        assert ".hydra/overrides.yaml, which says what was typed, can be read" in sentence, text
