"""eval.metrics: scores of the user's own, however the held-out samples are batched."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.loops.evaluate import evaluate
from lowvram.loops.session import Session
from lowvram.loops.user_metrics import Collected, MeanOverSamples, user_metrics
from tests.calls import TINY, Outcome
from tests.loops.sessions import Drawn
from tests.refusals import refusal
from tests.yours import rightness

NAMES = ["rightness", "mean_rightness", "Largest"]
METRICS = [f"tests.yours.{name}" for name in NAMES]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_they_are_of_all_held_out_samples(make_session: Callable[..., Session], batch_size: int) -> None:
    session = make_session(batch_size=batch_size, metrics=METRICS)
    scores = evaluate(session).scores
    assert isinstance(session.data.eval, Drawn)
    batch, model = session.data.eval.batch, session.rig.model.eval()
    with torch.no_grad():
        outputs = model(batch.inputs)
    wanted = rightness(outputs, batch.targets).mean().item()
    assert scores["rightness"] == scores["mean_rightness"] == pytest.approx(wanted)
    assert scores["Largest"] == pytest.approx(outputs.max().item())
    assert {*scores} == {"perplexity", "accuracy", *NAMES}


def test_each_evaluation_begins_anew(make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(metrics=METRICS)
    first = evaluate(session)
    for parameter in session.rig.model.parameters():
        parameter.data.mul_(0.1)
    assert evaluate(session).scores["Largest"] < first.scores["Largest"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("tests.yours.nowhere", r"eval\.metrics='tests\.yours\.nowhere': must be .* tests\.yours has no nowhere"),
        ("tests.yours.Regression", "compute.*: a Regression has not"),
    ],
)
def test_what_is_no_metric_is_refused(target: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        user_metrics([target], torch.device("cpu"))


def test_their_tensors_are_on_the_points_device_before_any_sample() -> None:
    metrics = user_metrics(["tests.yours.rightness", "tests.yours.Buffered"], torch.device("meta"))
    mean, collected = metrics["rightness"], metrics["Buffered"]
    assert isinstance(mean, MeanOverSamples)
    assert isinstance(collected, Collected)
    assert mean.sums.is_meta
    assert collected.metric.seen.is_meta


def test_a_function_without_a_signature_is_one_of_outputs_and_targets() -> None:
    (metric,) = user_metrics(["torch.dist"], torch.device("cpu")).values()
    assert isinstance(metric, MeanOverSamples)


def test_what_is_no_number_is_refused(make_session: Callable[..., Session]) -> None:
    with pytest.raises(RuntimeError, match="returns numbers, one for each sample or their mean: this returned 'good'"):
        evaluate(make_session(metrics=["tests.yours.no_number"]))
    with pytest.raises(RuntimeError, match=r"a metric whose compute\(\) returns one number: this returned None"):
        evaluate(make_session(metrics=["tests.yours.NoScore"]))


@pytest.mark.slow  # quicker: an evaluation that fails, in test_rescue.py
def test_what_was_trained_before_one_fails_can_be_resumed(call: Callable[..., Outcome]) -> None:
    words = (*TINY, "train.steps=2", "snapshot.every_steps=1")
    run = call(*words, "eval.metrics=[tests.yours.no_number]", "hydra.run.dir=one")
    assert (run.code, run.row["status"]) == (1, "error"), run.said()
    assert "eval.metrics='tests.yours.no_number': must be a function that returns numbers" in run.row["reason"]
    assert call("resume=one", "eval.metrics=null").row["status"] == "ok"


def test_from_the_command_line(call: Callable[..., Outcome]) -> None:
    run = call(*TINY, "train.steps=2", f"eval.metrics=[{','.join(METRICS)}]", "train.eval_every=1")
    assert run.code == 0, run.said()
    assert run.row["eval"]["rightness"] == pytest.approx(run.row["eval"]["mean_rightness"])
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "eval/Largest" in line]) == 2
    assert "rightness" in run.out


def test_mistakes_are_one_sentence(call: Callable[..., Outcome]) -> None:
    said = ": must be a list of functions with other names"
    for names, twice in {"a.accuracy": ["accuracy"], "a.f1,b.f1": ["f1", "f1"]}.items():
        assert refusal(*TINY, f"eval.metrics=[{names}]").startswith(f"eval.metrics={twice}{said}")
    run = call(*TINY, "eval.metrics=[tests.yours.rightness]", "logits=chunked")
    assert "must be null with this option of logits" in run.sentence
    assert not run.folders


def test_they_change_neither_the_loss_nor_other_scores_nor_the_training(make_session: Callable[..., Session]) -> None:
    plain = evaluate(make_session(metrics=METRICS))
    session = make_session(metrics=["tests.yours.spoiling", "tests.yours.Spoiling", *METRICS])
    spoilt = evaluate(session)
    assert spoilt.loss == plain.loss
    assert spoilt.scores == {**plain.scores, "spoiling": 0, "Spoiling": 0}
    assert evaluate(session).loss == plain.loss
    assert not torch.is_autocast_enabled("cpu")
