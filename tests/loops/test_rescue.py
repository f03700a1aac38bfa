"""An error in a step: the last whole step is saved, and the run goes on from it to the last digit."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowvram.core.generators import sources_of
from lowvram.core.knob import Knob
from lowvram.core.rig import IGNORE
from lowvram.core.untouched import marking
from lowvram.loops import train
from lowvram.loops.export.folder import load
from lowvram.loops.metrics_log import Metrics
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train
from lowvram.results.files.run_folder import snapshots_in
from lowvram.results.metric_lines import read_lines
from tests.loops.sessions import Told
from tests.tiers import first_of

MakeSession = Callable[..., Session]
Patch = pytest.MonkeyPatch
Breaks = Callable[[Session, Patch, BaseException], Session]
FAILING = 4  # the step that fails


def failing(
    call: Callable[..., Any],
    at: int,
    error: BaseException,
    *,
    is_late: bool = False,
    counts: Callable[[], bool] = torch.is_grad_enabled,
) -> Callable[..., Any]:
    """The function, whose call number `at` raises the error, before it does anything or at its end. Calls of
    evaluations don't count."""
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += counts()
        if calls == at and not is_late:
            raise error
        result = call(*args)
        if calls == at:
            raise error
        return result

    return counted


def in_data(session: Session, patch: Patch, error: BaseException) -> Session:
    samples = session.data.train
    patch.setattr(samples, "sample", failing(samples.sample, 4 * FAILING - 1, error))
    return session


def in_model(session: Session, patch: Patch, error: BaseException) -> Session:
    """After the random numbers of the step were drawn."""
    forward = failing(session.rig.forward, FAILING, error, is_late=True)
    return replace(session, rig=replace(session.rig, forward=forward))


def in_loss(session: Session, patch: Patch, error: BaseException) -> Session:
    return replace(session, rig=replace(session.rig, criterion=failing(session.rig.criterion, FAILING, error)))


def in_backward(session: Session, patch: Patch, error: BaseException) -> Session:
    patch.setattr(session.rig.stepper, "backward", failing(session.rig.stepper.backward, FAILING, error))
    return session


def in_optimizer(session: Session, patch: Patch, error: BaseException, is_late: bool = False) -> Session:
    stepper: Any = session.rig.stepper
    optimizer: Any = vars(stepper).get("inner", stepper).optimizer
    optimizer.step = failing(optimizer.step, FAILING, error, is_late=is_late, counts=lambda: True)
    marking(optimizer)
    return session


def late_in_optimizer(session: Session, patch: Patch, error: BaseException) -> Session:
    return in_optimizer(session, patch, error, is_late=True)


def between_movements(session: Session, patch: Patch, error: BaseException) -> Session:
    """Of weights along a direction and back."""
    stepper = session.rig.stepper
    patch.setattr(stepper, "backward", failing(stepper.backward, 2 * FAILING, error, counts=lambda: True))
    return session


def in_evaluation(session: Session, patch: Patch, error: BaseException) -> Session:
    """Of step 3, after it has drawn random numbers."""

    def broken(session: Session) -> Any:
        torch.rand(3)
        raise error

    patch.setattr(train, "evaluate", broken)
    return session


BREAKS: dict[str, Breaks] = {each.__name__: each for each in (in_data, in_model, in_loss, in_backward, in_optimizer)}
BREAKS["in_evaluation"] = in_evaluation


def weights(session: Session) -> dict[str, torch.Tensor]:
    return load(session.folder / "model").state_dict()


def test_a_line_that_cannot_be_written_loses_no_step_and_no_line(
    make_session: MakeSession, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, before, after = Told(), Told(), Told()
    Train().run(whole := make_session(told=wanted))
    for path in snapshots_in(whole.folder / "snapshots"):
        path.unlink()
    write = Metrics.write

    def failing_at_3(file: Metrics, step: int, values: dict[str, float]) -> None:
        if step == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "metrics.jsonl")
        write(file, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", failing_at_3)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            Train().run(make_session(told=before))
    assert "the log of step 3 has failed; step 3 is saved\n" in capsys.readouterr().err
    Train().run(make_session(told=after, is_resumed=True))
    rows = read_lines(whole.folder / "metrics.jsonl").rows
    losses = [(row["step"], row["loss/train"]) for row in rows if "loss/train" in row]
    assert losses == wanted.values("loss/train")
    (begun,) = [fields for event, fields in after.events if event == "begin"]
    assert [row["step"] for row in begun["untold"]] == [3]
    assert "missing" not in capsys.readouterr().out


@pytest.mark.parametrize("error", first_of([ValueError("broken"), SystemExit(3)]), ids=["error", "exit"])
@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_an_error_in_a_step_loses_no_step(
    make_session: MakeSession,
    breaks: Breaks,
    error: BaseException,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of whatever class: code of the user's may call sys.exit. And the evaluation that failed is made up."""
    about: dict[str, Any] = {"problem": "transformer_dropout", "eval_every": 3, "choices": {"activations": "int8"}}
    wanted = Told()
    Train().run(whole := make_session(told=wanted, **about))
    expected = weights(whole)
    for path in snapshots_in(whole.folder / "snapshots"):
        path.unlink()
    before, after = Told(), Told()
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        Train().run(breaks(make_session(told=before, **about), patch, error))
    assert [path.name.partition(".")[0] for path in snapshots_in(whole.folder / "snapshots")] == ["step_00000003"]
    what = "the evaluation after step 3" if breaks is in_evaluation else f"step {FAILING}"
    assert f"{what} has failed; step 3 is saved\n" in capsys.readouterr().err
    Train().run(make_session(told=after, is_resumed=True, **about))
    for name in ("loss/train", "loss/eval"):
        assert before.values(name) + after.values(name) == wanted.values(name)
    torch.testing.assert_close(weights(whole), expected, rtol=0, atol=0)


LOST: dict[str, tuple[dict[str, str | Knob], Breaks, str]] = {
    "after the update": ({"optimizer": "sgd"}, late_in_optimizer, "since step 4 has changed weights"),
    "between two movements": ({"stepping": "zeroth_order"}, between_movements, "since step 4 has changed weights"),
}


@pytest.mark.parametrize(("choices", "breaks", "why"), LOST.values(), ids=LOST)
def test_weights_that_have_changed_are_not_saved_as_those_of_the_step_before(
    make_session: MakeSession,
    choices: dict[str, str | Knob],
    breaks: Breaks,
    why: str,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = make_session(choices=choices, snapshot_every=2)
    with pytest.raises(ValueError, match="broken"):
        Train().run(breaks(session, monkeypatch, ValueError("broken")))
    told = capsys.readouterr().err
    assert why in told
    newest = snapshots_in(session.folder / "snapshots")
    assert ("the newest snapshot is of step 2" if newest else "there is no snapshot") in told


def test_a_batch_without_a_target_loses_no_step(make_session: MakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session = make_session("transformer", choices={"logits": "chunked"})
    batch = session.data.train.batch  # pyright: ignore[reportAttributeAccessIssue]
    batch.targets[list(first_key(session, 3))] = IGNORE
    Train().run(session)
    assert "step 4: no target counts in this batch" in capsys.readouterr().out
    assert len(snapshots_in(session.folder / "snapshots")) == 1


def first_key(session: Session, step: int) -> list[int]:
    """The samples of the batch after so many steps."""
    keys = session.data.train.keys(session.settings.root.seed, session.sizes.before(step))
    return [next(keys)[0] for _ in range(session.sizes.at(step))]


def test_weights_that_are_no_numbers_push_out_no_older_snapshot(
    make_session: MakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    session = make_session(log_every=9, snapshot_every=1)
    parameter = next(session.rig.model.parameters())
    update, calls = session.rig.stepper.update, [0]

    def diverge() -> Any:
        calls[0] += 1
        result = update()
        if calls[0] == FAILING - 1:
            parameter.data.fill_(torch.inf)
        return result

    session.rig.stepper.update = diverge
    told: Any = session.events
    told.stop_at = None
    with pytest.raises(ArithmeticError):
        Train().run(session)
    assert "there is no snapshot" not in capsys.readouterr().err


def test_a_second_signal_saves_nothing_more(make_session: MakeSession, monkeypatch: Patch) -> None:
    session = in_data(make_session(), monkeypatch, Interrupted("now"))
    with pytest.raises(Interrupted):
        Train().run(session)
    assert not snapshots_in(session.folder / "snapshots")


def test_statistics_that_count_the_failed_step_are_named(
    make_session: MakeSession, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = in_loss(make_session("resnet"), monkeypatch, ValueError("broken"))
    assert any(isinstance(module, nn.BatchNorm2d) for module in session.rig.model.modules())
    with pytest.raises(ValueError, match="broken"):
        Train().run(session)
    told = capsys.readouterr().err
    assert "step 3 is saved (" in told
    assert "already count samples of step 4)" in told


class Counting(nn.Module):
    """As a part of a user's model that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.draws = 0, random.Random(0)

    def forward(self) -> None:
        self.steps += 1
        self.draws.random()


def test_what_modules_count_is_that_of_the_last_whole_step(make_session: MakeSession, monkeypatch: Patch) -> None:
    session = make_session()
    counting, forward = Counting(), session.rig.forward
    session.rig.model.add_module("counting", counting)
    states = list[str]()

    def counted(part: Any) -> Any:
        counting()
        states.append(sources_of(counting)[0].text())
        return forward(part)

    session = in_loss(replace(session, rig=replace(session.rig, forward=counted)), monkeypatch, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        Train().run(session)
    (path,) = snapshots_in(session.folder / "snapshots")
    held = torch.load(path, weights_only=True)["random"][0]["unregistered"]
    assert counting.steps == FAILING
    assert held["values"] == {"counting": {"steps": FAILING - 1}}
    assert held["generators"] == [states[FAILING - 2]]
