"""callbacks: told every moment with plain values; one that fails costs a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.launch.spec import Point
from lowvram.results.terminal import QuietProgress
from lowvram.runs.callbacks import Callbacks, check_callbacks
from lowvram.runs.run import run_point
from tests.calls import Outcome
from tests.runs.test_remeasure import CONFIG, Scripted

QUICK = ("train.steps=2", "train.batch_size=4", "data.eval_samples=4", "logger=none")


def test_every_moment_is_told_in_its_order(call: Callable[..., Outcome]) -> None:
    run = call(*QUICK, "callbacks=[tests.yours.Diary]", "train.eval_every=1", "snapshot.every_steps=1")
    assert run.code == 0, run.said()
    score = "evaluation {} ['eval/accuracy', 'eval/perplexity', 'loss/eval']"
    told = (run.cwd / "diary.txt").read_text().splitlines()
    assert told == [
        "begin 0 2",
        *("step 1 loss/train", score.format(1), "snapshot 1 True"),
        *("step 2 loss/train", score.format(2), "snapshot 2 True"),
        "end ok",
    ]
    assert '"loss/train"' in (run.folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_resumed_run_and_a_run_that_fails_are_told(call: Callable[..., Outcome]) -> None:
    call(*QUICK, "hydra.run.dir=one")
    resumed = call("resume=one", "train.steps=3", "callbacks=[tests.yours.Diary]")
    assert (resumed.cwd / "diary.txt").read_text().splitlines()[0] == "begin 2 3"
    failed = call(*QUICK, "callbacks=[tests.yours.Diary]", "optimizer.lr=1e30", "optimizer=sgd")
    assert failed.code == 1
    assert (failed.cwd / "diary.txt").read_text().splitlines()[-1] == "end nonfinite"


def test_steps_that_nobody_watched_are_told_when_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {**CONFIG, "callbacks": ["tests.yours.Diary"], "measure": {"reruns": 0, "fidelity": False}}
    config["train"] = {"batch_size": 1, "steps": 1}
    point = Point("id", "name", 0, tmp_path, config, {"mode": "train"}, sweep=None, provenance={})
    server = Scripted([(None, 2.0)], untold=[{"step": 1, "loss/train": 3.0}, {"step": 1, "loss/eval": 4.0}])
    run_point(point, server, QuietProgress(io.StringIO()), lambda: 0, lambda _: None)  # pyright: ignore[reportArgumentType]
    told = ["step 1 loss/train", "evaluation 1 ['loss/eval']", "step 1 loss/train", "end ok"]
    assert (tmp_path / "diary.txt").read_text().splitlines()[1:] == told


def test_one_that_fails_is_told_once_and_the_run_goes_on(call: Callable[..., Outcome]) -> None:
    run = call(*QUICK, "train.steps=3", "callbacks=[tests.yours.Failing,tests.yours.Diary]")
    assert run.code == 0, run.said()
    sentence = "the callback tests.yours.Failing failed in `step` and is not called again: RuntimeError: no more ink"
    assert run.out.count(sentence) == 1
    assert (run.cwd / "diary.txt").read_text().splitlines()[-1] == "end ok"


def test_a_name_without_anything_behind_it_is_refused_at_once(call: Callable[..., Outcome]) -> None:
    run = call(*QUICK, "callbacks=[tests.yours.Nobody]")
    assert run.code == 3
    assert "callbacks='tests.yours.Nobody': must be the dotted name of a class or function" in run.err
    assert not run.folders
    with pytest.raises(BadInput, match="callbacks"):
        check_callbacks(["nowhere.Thing"])


def test_a_module_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "inkless.py").write_text("raise OSError('no ink')\n")
    said = r"callbacks='inkless.Watch': must be importable: its module raises OSError: no ink"
    with pytest.raises(BadInput, match=said):
        check_callbacks(["inkless.Watch"])


def test_what_is_made_may_exit_without_ending_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.yours.Diary.begin", lambda *_: exit(5))
    told: list[str] = []
    callbacks = Callbacks(["tests.yours.Diary"], told.append)
    callbacks.begin({}, 0)
    callbacks.end({"status": "ok"})
    assert told == ["the callback tests.yours.Diary failed in `begin` and is not called again: SystemExit: 5"]
    assert not (tmp_path / "diary.txt").exists()


def test_an_autocast_that_a_callback_leaves_on_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tests import yours

    class Leaving:
        def step(self, step: int, values: dict[str, float]) -> None:
            torch.autocast("cpu").__enter__()

    monkeypatch.setattr(yours, "Leaving", Leaving, raising=False)
    Callbacks(["tests.yours.Leaving"], print).log(1, {})
    assert not torch.is_autocast_enabled("cpu")
