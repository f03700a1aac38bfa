"""mode=train without a parent: what is told, what is saved, and that going on is as if nothing had happened."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.generators import seed_all
from lowvram.core.knob import Knob
from lowvram.core.rig import IGNORE
from lowvram.core.stepper import Update
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import CpuOffload, InBackward, Norm
from lowvram.loops.evaluate import evaluate
from lowvram.loops.export.folder import load
from lowvram.loops.measure import Measure
from lowvram.loops.metrics_log import MetricsLog
from lowvram.loops.schedule import WarmupCosine
from lowvram.loops.session import Interrupted, NonFinite, Session
from lowvram.loops.snapshot import fingerprint
from lowvram.loops.train import Train, TrainingRun
from lowvram.results.metric_lines import read_lines, to_line
from tests.laboratory import relative_error
from tests.loops.sessions import Told
from tests.tiers import first_of

pytestmark = pytest.mark.medium

MakeSession = Callable[..., Session]
CHOICES: dict[str, dict[str, str | Knob]] = {
    "plain": {},
    "bf16": {"precision": "bf16", "accum": "x4", "ckpt": "every2"},
    "fp16": {"precision": Fp16(init_scale=2.0**24, growth_interval=2), "accum": "x2"},
    "sgd": {"optimizer": "sgd"},
    "in_backward": {"stepping": InBackward(clip=0.5, norm=Norm.last_step)},
    "cpu_offload": {"stepping": CpuOffload(clip=0.5, offload_fraction=0.6), "accum": "x2"},
    "zeroth_order": {"stepping": "zeroth_order", "accum": "x2"},
    "in_backward, fp16": {"stepping": "in_backward", "precision": Fp16(init_scale=2.0**24, growth_interval=2)},
}


def losses(told: Told) -> list[tuple[int, float]]:
    return told.values("loss/train")


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_run_that_was_stopped_goes_on_to_the_last_digit(
    make_session: MakeSession, problem: str, choices: dict[str, str | Knob]
) -> None:
    """Data, dropout, schedule, optimizer and loss scale: all are where they were."""
    common: dict[str, Any] = {"choices": choices, "schedule": WarmupCosine(warmup_frac=0.3), "eval_every": 2}
    whole, first, second = Told(), Told(stop_at=3), Told()
    uninterrupted = make_session(problem, told=whole, **common)
    Train().run(uninterrupted)
    folder = uninterrupted.folder / "stopped"
    folder.mkdir()
    with pytest.raises(Interrupted, match="stopped after step 3 of 6"):
        Train().run(replace(make_session(problem, told=first, **common), folder=folder))
    torch.manual_seed(99)
    row = Train().run(replace(make_session(problem, told=second, is_resumed=True, **common), folder=folder))
    assert losses(first) + losses(second) == losses(whole)
    assert first.values("lr") + second.values("lr") == whole.values("lr")
    assert first.values("loss/eval") + second.values("loss/eval") == whole.values("loss/eval")
    assert row["loss"]["first"] == losses(whole)[0][1]
    weights = [load(place / "model").state_dict() for place in (uninterrupted.folder, folder)]
    assert relative_error(*weights) == 0


def test_what_numpy_and_python_draw_goes_on_too(make_session: MakeSession) -> None:
    def session(**changes: Any) -> Session:
        made = make_session("transformer", **changes)
        made.rig.model.register_forward_hook(lambda _, __, out: out * np.random.randn() * random.gauss(1, 0.1))
        return made

    whole, first, second = Told(), Told(stop_at=3), Told()
    seed_all(0)
    uninterrupted = session(told=whole)
    Train().run(uninterrupted)
    folder = uninterrupted.folder / "stopped"
    folder.mkdir()
    seed_all(0)
    with pytest.raises(Interrupted):
        Train().run(replace(session(told=first), folder=folder))
    seed_all(99)
    Train().run(replace(session(told=second, is_resumed=True), folder=folder))
    assert losses(first) + losses(second) == losses(whole)


@pytest.mark.parametrize("stepping", ["after_backward", "in_backward", "cpu_offload"])
@pytest.mark.parametrize("bf16_pure", [False, True])
def test_numbers_of_the_optimizer_that_are_chosen_anew_win(
    make_session: MakeSession, stepping: str, bf16_pure: bool
) -> None:
    """Over those that were saved; what an optimizer has counted is kept."""
    common: dict[str, Any] = {"stepping": stepping, "precision": "bf16_pure" if bf16_pure else "fp32"}
    Train().run(make_session(choices={**common, "optimizer": AdamW(weight_decay=0.1)}, steps=3))
    again = make_session(choices={**common, "optimizer": AdamW(weight_decay=0.7, beta1=0.5)}, is_resumed=True)
    run = TrainingRun(again, MetricsLog(again.folder, Told()))
    state = again.rig.stepper.state_dict()
    (groups,) = [one["param_groups"] for one in state.get("optimizers", [state])][:1]
    assert run.step == 3
    assert groups[0]["weight_decay"] == 0.7
    assert groups[0]["betas"] == (0.5, 0.95)
    assert groups[0].get("noise_step", 3) == 3


def test_events_come_in_order(make_session: MakeSession) -> None:
    told = Told()
    Train().run(make_session(told=told, eval_every=3))
    event, fields = told.events[0]
    assert (event, fields["step"], fields["num_steps"]) == ("begin", 0, 6)
    assert [step for step, _ in losses(told)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in told.values("loss/eval")] == [3, 6]
    assert {"throughput/samples_per_s", "throughput/tokens_per_s", "grad_norm", "lr"} <= told.events[1][1][
        "values"
    ].keys()


def test_only_some_steps_are_logged(make_session: MakeSession) -> None:
    told = Told()
    Train().run(make_session(told=told, log_every=4, steps=9))
    assert [step for step, _ in losses(told)] == [1, 4, 8, 9]


def test_the_memory_held_is_told_by_kind_at_some_of_the_logged_steps(make_session: MakeSession) -> None:
    told = Told()
    Train().run(make_session(told=told, log_every=2, steps=40))
    held = told.values("memory_now/optimizer_gib")
    assert [step for step, _ in held] == [1, 2, 20, 40]
    assert len({size for _, size in held}) == 1  # made by the first step
    (over_step,) = [fields for event, fields in told.events if event == "memory_over_step"]
    activations = 2 + over_step["kinds"].index("activations")
    assert max(moment[activations] for moment in over_step["moments"]) > 0


def test_snapshots_are_made_when_due_and_at_the_end(make_session: MakeSession) -> None:
    session = make_session(snapshot_every=2, steps=5)
    Train().run(session)
    names = sorted(path.name.partition(".")[0] for path in (session.folder / "snapshots").iterdir())
    assert names == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_snapshot_carries_the_rows_that_nobody_was_told(make_session: MakeSession, is_heard: bool) -> None:
    """And the run that goes on tells them, before its own. They are in the file all the same."""
    told = Told(stop_at=3, is_heard=is_heard)
    with pytest.raises(Interrupted):
        Train().run(make_session(told=told, snapshot_every=2))
    rows = [{"step": fields["step"], **fields["values"]} for event, fields in told.events if event == "metrics"]
    session, again = make_session(told=Told(), is_resumed=True), Told()
    assert read_lines(session.folder / "metrics.jsonl").rows == rows
    Train().run(replace(session, events=again))
    event, fields = again.events[0]
    assert event == "begin"
    assert fields["untold"] == ([] if is_heard else rows)


@pytest.mark.parametrize("place", [1, 2, 4])
def test_a_run_that_goes_on_knows_its_rows(
    make_session: MakeSession, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    """Its first loss, and the last one before the snapshot: rows of another run say something else. A line in between
    is one that was altered."""
    told = Told(stop_at=4)
    with pytest.raises(Interrupted):
        Train().run(make_session(told=told, log_every=2))
    session = make_session(is_resumed=True)
    file = session.folder / "metrics.jsonl"
    rows = read_lines(file).rows
    assert [row["step"] for row in rows if "loss/train" in row] == [1, 2, 4]
    file.write_text("".join(to_line(row | {"loss/train": 0.5} if row["step"] == place else row) for row in rows))
    Train().run(session)
    said = capsys.readouterr().out
    assert ("metrics.jsonl: its lines are another run's" in said) == (place != 2)
    assert (f"metrics.jsonl: 1 of {len(rows)} lines up to step 4 are missing" in said) == (place == 2)


def test_a_run_begins_where_a_snapshot_of_an_early_version_carries_rows(make_session: MakeSession) -> None:
    """The file may lack them, and only they are told that it lacks."""
    session = make_session()
    rows = [{"step": step, "loss/train": 1 / step} for step in (1, 2, 3)]
    (session.folder / "metrics.jsonl").write_text(to_line(rows[0]) + to_line(rows[1]) + to_line({"step": 4}))
    with MetricsLog(session.folder, Told()) as log:
        log.restore({"untold": rows[1:]})
        assert log.begin(3) == rows[2:]
    assert read_lines(session.folder / "metrics.jsonl").rows == rows


def test_a_finished_run_that_is_resumed_only_finishes(make_session: MakeSession) -> None:
    row = Train().run(make_session())
    told, session = Told(), make_session(told=Told())
    folder = session.folder / "snapshots"
    (last,) = folder.iterdir()
    for number in (1, 2):  # that a killed program was about to remove
        (folder / f"step_0000000{number}.0123456789abcdef.pt").touch()
    again = Train().run(make_session(told=told, is_resumed=True))
    assert sorted(path.name[:13] for path in folder.iterdir()) == ["step_00000002", last.name[:13]]
    assert losses(told) == []
    assert again["loss"] == row["loss"]
    assert again["time"]["steps"] == 0


FORGED = ("text", [], {}, 2.5, torch.zeros(2, 2), [{"param_groups": None}])


@pytest.mark.parametrize("value", first_of(FORGED, 2))
def test_what_a_forged_snapshot_holds_is_taken_or_refused(
    make_session: MakeSession, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """Whatever is in it, and however right its hash: one sentence instead of a traceback."""
    with pytest.raises(Interrupted):
        Train().run(make_session(told=Told(stop_at=2)))
    folder = make_session().folder / "snapshots"
    (saved,) = folder.iterdir()
    whole, num_refused = torch.load(saved, weights_only=True), 0
    saved.unlink()
    for key in whole.keys() - {"run"}:
        file = folder / "forged"
        torch.save({**whole, key: value}, file)
        file = file.rename(folder / f"step_00000002.{fingerprint(file)}.pt")
        try:
            Train().run(make_session(is_resumed=True, steps=3))
        except (BadInput, Incompatible) as refusal:
            num_refused += "\n" not in str(refusal)
        for path in folder.iterdir():
            path.unlink()
    assert num_refused > 7, capsys.readouterr().out


def test_the_weights_that_are_left_are_those_that_were_evaluated(make_session: MakeSession) -> None:
    session = make_session("resnet")
    row = Train().run(session)
    model = load(session.folder / "model")
    plain = replace(session, rig=replace(session.rig, model=model, forward=lambda part: model(part.inputs)))
    assert evaluate(plain).loss == row["loss"]["eval"]


def test_a_file_in_the_way_of_the_weights_is_reported_before_the_first_step(make_session: MakeSession) -> None:
    told = Told()
    session = make_session(told=told)
    (session.folder / "model").mkdir(parents=True)
    (session.folder / "model" / "config.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"model/config\.json is in the way"):
        Train().run(session)
    assert losses(told) == []
    assert (session.folder / "model" / "config.json").read_text() == "mine"


def test_a_row_says_what_the_knobs_did(make_session: MakeSession) -> None:
    choices: dict[str, str | Knob] = {"accum": "x2", "precision": Fp16(init_scale=2.0**31), "activations": "int8"}
    row = Train().run(make_session("resnet", choices=choices, steps=12))
    assert "BatchNorm normalises over each of the 2 parts" in row["semantics_changed"]
    assert row["precision"]["skipped_steps"] > 0
    assert row["precision"]["scale"] == 2.0 ** (31 - row["precision"]["skipped_steps"])
    assert row["model"]["blocks"] == "3 BasicBlock"
    assert row["model"]["parameters"] == row["model"]["trainable"] > 0
    assert row["time"]["steps"] == 10  # two settle


def test_a_skipped_step_does_not_move_the_schedule(make_session: MakeSession) -> None:
    told, choices = Told(), {"precision": Fp16(init_scale=2.0**24)}
    row = Train().run(make_session(told=told, choices=choices, schedule=WarmupCosine(warmup_frac=0.5), steps=12))
    skipped = row["precision"]["skipped_steps"]
    rates = [lr for _, lr in told.values("lr")]
    assert 0 < skipped < 11
    assert rates[: skipped + 1] == [rates[0]] * (skipped + 1)
    assert rates[skipped + 1] == pytest.approx(2 * rates[0])


@pytest.mark.parametrize("log_every", [1, 3])
def test_numbers_that_are_none_end_the_run(make_session: MakeSession, log_every: int) -> None:
    session = make_session(log_every=log_every)
    with torch.no_grad():
        next(session.rig.model.parameters()).fill_(math.nan)
    with pytest.raises(NonFinite, match=r"try a smaller learning rate \(optimizer.lr=0.0001\) or stepping.clip=1.0"):
        Train().run(session)


@pytest.mark.parametrize("choices", [{}, {"precision": "fp16"}, {"stepping": "in_backward"}, {"accum": "x2"}])
@pytest.mark.parametrize("mode", [Train(), Measure()])
def test_a_batch_without_a_target_is_reported_as_such(
    make_session: MakeSession, mode: Train | Measure, choices: dict[str, str | Knob]
) -> None:
    """No learning rate mends 0/0."""
    session = make_session(choices=choices)
    targets = session.data.train.batch.targets  # pyright: ignore[reportAttributeAccessIssue]
    targets.fill_(IGNORE)
    with pytest.raises(NonFinite, match="no target counts in this batch, all are -100"):
        mode.run(session)


def test_held_out_samples_without_a_target_are_reported_as_such(make_session: MakeSession) -> None:
    session = make_session()
    session.data.eval.batch.targets.fill_(IGNORE)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(NonFinite, match="no target counts in the held-out samples"):
        evaluate(session)


def test_an_update_that_no_scale_can_mend_ends_the_run(make_session: MakeSession) -> None:
    session = make_session()
    batch = next(session.batches(0))
    hopeless = Update(torch.tensor(math.inf), applied=False, recoverable=False)
    session.rig.stepper.update = lambda: hopeless
    with pytest.raises(NonFinite, match="the gradients are not finite any more"):
        session.update(batch, 0, 6)


def test_batches_without_a_target_change_nothing(make_session: MakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the first one, and the last; the run is resumed as if it had not been stopped."""

    def with_dead(dead: set[int], **options: Any) -> Session:
        session = make_session(**options)
        data: Any = session.data.train
        batches = session.batches(0)
        for step in range(6):
            batch = next(batches)
            if step in dead:
                is_of_batch = (data.batch.inputs[:, None] == batch.inputs[None]).flatten(2).all(2).any(1)
                data.batch.targets[is_of_batch] = IGNORE
        batches.close()
        return session

    for dead, stop_at in (({0, 3}, 5), ({5}, 4)):
        told, first, second = Told(), Told(stop_at=stop_at), Told()
        whole = with_dead(dead, told=told)
        row = Train().run(whole)
        steps = [step for step, _ in losses(told)]
        assert steps == [step + 1 for step in range(6) if step not in dead]
        assert row["loss"]["first"] == losses(told)[0][1]
        assert capsys.readouterr().out.count("no target counts in this batch, all are -100: no update") == 1
        folder = whole.folder / f"stopped at {stop_at}"
        folder.mkdir()
        with pytest.raises(Interrupted):
            Train().run(replace(with_dead(dead, told=first), folder=folder))
        Train().run(replace(with_dead(dead, told=second, is_resumed=True), folder=folder))
        assert losses(first) + losses(second) == losses(told)
        capsys.readouterr()
