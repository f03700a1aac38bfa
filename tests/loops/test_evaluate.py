"""Evaluation: the mean over all held-out targets, however they are batched, and without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowvram.core.generators import seed_all
from lowvram.core.rig import IGNORE, Part
from lowvram.knobs.depth import EarlyExit
from lowvram.loops import evaluate as evaluate_module
from lowvram.loops.evaluate import Evaluation, evaluate, in_evaluation
from lowvram.loops.exported import held_out, mean_loss
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train
from lowvram.tasks import UserProblem
from tests.laboratory import relative_error
from tests.loops.sessions import Drawn, Told


def by_hand(session: Session) -> tuple[float, float]:
    """(mean loss, accuracy) over all held-out targets, in one piece."""
    assert isinstance(session.data.eval, Drawn)
    batch, model = session.data.eval.batch, session.rig.model.eval()
    with torch.no_grad():
        logits = model(batch.inputs).flatten(0, -2)
    targets = batch.targets.flatten()
    kept = targets != IGNORE
    correct = logits.argmax(-1)[kept] == targets[kept]
    model.train()
    return F.cross_entropy(logits[kept], targets[kept]).item(), correct.double().mean().item()


@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_the_mean_weighs_every_target_the_same(
    make_session: Callable[..., Session], problem: str, batch_size: int
) -> None:
    """10 samples with targets of uneven number: the last part is smaller, and means of parts would be wrong."""
    session = make_session(problem, batch_size=batch_size)
    found = evaluate(session)
    loss, accuracy = by_hand(session)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.scores["accuracy"] == pytest.approx(accuracy)


def test_parts_are_no_larger_than_those_of_training(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(batch_size=8, choices={"accum": "x4"})
    sizes: list[int] = []

    def part_sums(session: Session, rig: object, part: Part, metrics: object) -> torch.Tensor:
        sizes.append(part.num_samples)
        return torch.ones(3)

    monkeypatch.setattr(evaluate_module, "part_sums", part_sums)
    evaluate(session)
    assert sizes == [2] * 5


@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
def test_evaluation_leaves_no_trace(make_session: Callable[..., Session], problem: str) -> None:
    """No statistics move, no random number is drawn, and the model goes on training."""
    session = make_session(problem, choices={"ckpt": "every1"})
    before = {name: tensor.clone() for name, tensor in session.rig.model.state_dict().items()}
    random = torch.get_rng_state()
    evaluate(session)
    assert relative_error(session.rig.model.state_dict(), before) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert session.rig.model.training
    assert all(parameter.grad is None for parameter in session.rig.model.parameters())


def test_a_model_trains_again_even_if_its_evaluation_fails(make_session: Callable[..., Session]) -> None:
    session = make_session()

    def fail(part: Part) -> None:
        assert not session.rig.model.training
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        evaluate(replace(session, rig=replace(session.rig, forward=fail)))
    assert session.rig.model.training


def test_each_module_gets_its_own_mode_back(make_session: Callable[..., Session]) -> None:
    """Some models keep their norms in evaluation mode while they train."""
    session = make_session("resnet")
    kept = [module for module in session.rig.model.modules() if isinstance(module, nn.BatchNorm2d)][1:]
    for module in kept:
        module.eval()
    modes = [module.training for module in session.rig.model.modules()]
    evaluate(session)
    assert [module.training for module in session.rig.model.modules()] == modes


class Counted(nn.Linear):
    num_calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(input)


@torch.no_grad()
def test_an_evaluation_calls_the_layers_of_torchs_own_encoder() -> None:
    """What is put in their place would be left out by a path that reads their weights."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder.linear1 = Counted(8, 16)
    encoder.eval()(torch.randn(2, 3, 8))
    assert encoder.linear1.num_calls == 0  # else torch has no such path any more
    with in_evaluation(encoder):
        encoder(torch.randn(2, 3, 8))
    assert encoder.linear1.num_calls == 1


def test_what_an_evaluation_draws_changes_no_training(make_session: Callable[..., Session]) -> None:
    session = make_session("transformer")
    draws = [torch.rand, np.random.rand, lambda _: random.random()]
    session.rig.model.register_forward_hook(lambda *_: [draw(3) for draw in draws] and None)
    seed_all(0)
    wanted = [float(torch.rand(1)), float(np.random.rand()), random.random()]
    seed_all(0)
    evaluate(session)
    assert [float(torch.rand(1)), float(np.random.rand()), random.random()] == wanted


def test_metrics_have_wandbs_names() -> None:
    assert Evaluation(1.5, {"accuracy": 0.5}).metrics() == {"loss/eval": 1.5, "eval/accuracy": 0.5}


@pytest.mark.parametrize(("threshold", "share"), [(1.0, 1.0), (0.0, 1 / 3)])
def test_early_exits_are_evaluated_beside_the_whole_model(
    make_session: Callable[..., Session], threshold: float, share: float
) -> None:
    """The whole model's figures are those that it has without exits."""
    session = make_session(choices={"depth": EarlyExit([0], threshold=threshold)})
    found, plain = evaluate(session), evaluate(make_session())
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)
    assert found.scores["accuracy"] == plain.scores["accuracy"]
    assert found.scores["blocks_used"] == pytest.approx(share)
    is_whole = found.scores["loss_early"] == pytest.approx(found.loss, rel=1e-6)
    assert is_whole is (threshold == 1.0)
    assert 0 <= found.scores["accuracy_early"] <= 1


class Answers:
    """A loss whose targets weigh unevenly."""

    def __init__(self) -> None:
        self.loss = Remembering()

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(outputs, targets)

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        return 0.01 * (targets != IGNORE).sum()

    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == targets).sum()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + outputs.mean()
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORE)
        return 0.01 * loss * (1 + self.training)


def with_own_loss(session: Session) -> tuple[Session, Answers]:
    answers = Answers()
    problem = UserProblem(session.problem.model, session.problem.spec, answers, "answers")
    rig = replace(session.rig, task=problem, criterion=problem.criterion)
    return replace(session, problem=problem, rig=rig), answers


def test_a_loss_of_ones_own_is_evaluated_as_the_model_is_and_keeps_what_it_had(
    make_session: Callable[..., Session],
) -> None:
    session, answers = with_own_loss(make_session())
    found = evaluate(session)
    loss, accuracy = by_hand(session)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.scores == {"accuracy": pytest.approx(accuracy)}
    assert answers.loss.mean.item() == 0
    assert answers.loss.training
    with torch.no_grad():
        outputs = {part.inputs: session.rig.model.eval()(part.inputs) for part in held_out(session)}
    assert mean_loss(session.problem, outputs.__getitem__, held_out_again(outputs, session)) == pytest.approx(
        loss, rel=1e-6
    )


def held_out_again(outputs: dict[torch.Tensor, torch.Tensor], session: Session) -> list[Part]:
    return [replace(part, inputs=inputs) for part, inputs in zip(held_out(session), outputs, strict=True)]


def test_a_snapshot_holds_what_a_loss_of_ones_own_keeps(make_session: Callable[..., Session]) -> None:
    def run(**keywords: Any) -> float:
        session, answers = with_own_loss(make_session(**keywords))
        with suppress(Interrupted):
            Train().run(session)
        return answers.loss.mean.item()

    wanted = run()
    run(told=Told(stop_at=3))
    assert run(is_resumed=True) == wanted
