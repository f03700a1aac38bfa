"""snapshot.best, train.patience, train.max_hours, export.of: the best evaluation is kept, and the run ends in time."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.config.transforms import ExportedWeights
from lowvram.core.mesh import all_ranks
from lowvram.knobs.optimizer import AdamW
from lowvram.loops import ending
from lowvram.loops.ending import Best, Figure, Hours, figure_of
from lowvram.loops.export.folder import load
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train
from lowvram.results.files.run_folder import snapshots_in
from lowvram.results.metrics import Better
from tests.laboratory import relative_error
from tests.loops.sessions import Told, session_in
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium

MakeSession = Callable[..., Session]
# Random samples: what is learnt of some is wrong of the others, so that evaluations are soon worse.
OVERFITS: dict[str, Any] = {
    "choices": {"optimizer": AdamW(lr=0.02)},
    "eval_every": 2,
    "steps": 40,
    "best": "loss/eval",
    "patience": 3,
    "export_of": ExportedWeights.best,
}


def mine(outputs: Tensor, targets: Tensor) -> float:
    """A score of the user's own."""
    return float(outputs.float().mean())


def accuracy_early(outputs: Tensor, targets: Tensor) -> float:
    """Another, with a name like one of lowvram's."""
    return 0.5


@dataclass
class Killed(Told):
    """Leaves a copy of the run's folder as it is when a step's loss has been told: as a kill would leave it."""

    folder: Path = field(default_factory=Path)
    step: int = 0

    def __call__(self, event: str, **fields: Any) -> bool:
        if event == "metrics" and fields["step"] == self.step and "loss/train" in fields["values"]:
            shutil.copytree(self.folder, self.folder.with_name("killed"))
        return super().__call__(event, **fields)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[5:13]) for path in snapshots_in(folder / "snapshots")][::-1]


def test_the_best_snapshot_is_kept_and_exported(make_session: MakeSession, tmp_path: Path) -> None:
    """Its weights are those that a run has which ends there."""
    told = Told()
    session = make_session(told=told, snapshot_every=1, **OVERFITS)
    row = Train().run(session)
    evals = told.values("loss/eval")
    best_step, best = min(evals, key=lambda each: each[1])
    last = best_step + 2 * 3
    assert 1 < best_step < last < 40
    ending = {"steps": last, "ended_by": "patience", "exported_step": best_step}
    assert row["training"] == ending | {"best_step": best_step, "best_value": best}
    assert row["loss"]["eval"] == evals[-1][1] > best
    assert steps_in(session.folder) == [best_step, last - 1, last]
    changes = {"steps": best_step, "patience": None, "best": None, "export_of": ExportedWeights.last}
    there = session_in(tmp_path / "there", **{**OVERFITS, **changes})
    assert Train().run(there)["training"]["ended_by"] == "steps"
    assert relative_error(*(load(each.folder / "model").state_dict() for each in (session, there))) == 0


@pytest.mark.parametrize("choices", [{}, {"accum": "x2", "stepping": "in_backward"}])
def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(tmp_path: Path, choices: dict[str, Any]) -> None:
    """Stopped or killed, before its best evaluation, right after it, or while its patience runs out."""
    told, options = Told(), {**OVERFITS, "choices": {**OVERFITS["choices"], **choices}, "snapshot_every": 3}
    whole = session_in(tmp_path / "whole", told=told, **options)
    row = Train().run(whole)
    best_step = row["training"]["best_step"]
    for number, at in enumerate((1, best_step, best_step + 1, best_step + 4)):
        folder = tmp_path / f"{number}" / "run"
        killing = Killed(folder=folder, step=at + 1, stop_at=at + 2)
        with pytest.raises(Interrupted):
            Train().run(session_in(folder, told=killing, **options))
        for one in (folder, folder.with_name("killed")):
            again = Train().run(session_in(one, told=Told(), is_resumed=True, **options))
            assert again["training"] == row["training"], (at, one.name)
            assert again["loss"] == row["loss"]
            assert relative_error(*(load(each / "model").state_dict() for each in (whole.folder, one))) == 0


def test_a_run_that_has_lost_its_patience_only_finishes(
    make_session: MakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    row, told = Train().run(make_session(**OVERFITS)), Told()
    again = Train().run(make_session(told=told, is_resumed=True, **OVERFITS))
    assert told.values("loss/train") == []
    assert again["training"] == row["training"]
    more = Train().run(make_session(is_resumed=True, **{**OVERFITS, "patience": 5}))["training"]
    assert (more["steps"], more["best_step"]) == (row["training"]["steps"] + 4, row["training"]["best_step"])
    assert "gone" not in capsys.readouterr().out


def test_a_best_snapshot_that_is_gone_is_told(make_session: MakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of the run or, if it goes on, at once: it looks for a later one then."""
    session = make_session(**OVERFITS)
    best_step = Train().run(session)["training"]["best_step"]
    (best,) = (path for path in snapshots_in(session.folder / "snapshots") if f"{best_step:08d}" in path.name)
    best.write_bytes(b"damaged")
    row = Train().run(make_session(is_resumed=True, **OVERFITS))["training"]
    assert row["exported_step"] == row["steps"]
    assert f"the snapshot of step {best_step} isn't whole any more" in capsys.readouterr().out
    best.unlink()
    row = Train().run(make_session(is_resumed=True, **{**OVERFITS, "patience": 5}))["training"]
    assert f"the snapshot of step {best_step}, of the best snapshot.best=" in capsys.readouterr().out
    assert row["exported_step"] == row["best_step"] > best_step


def trained_on_ranks(folder: Path, choices: dict[str, Any], in_shards: bool) -> Any:
    best = "eval/mine:max" if in_shards else "loss/eval"
    common = {**OVERFITS, "metrics": ["tests.loops.test_ending.mine"], "best": best}
    common |= {"choices": {**OVERFITS["choices"], **choices}, "sharded_above_gib": 0.0 if in_shards else None}
    told = Told(stop_at=7 if all_ranks().is_first else None)
    try:
        Train().run(session_in(folder, told=told, **common))
    except Interrupted:
        told = Told()
        row = Train().run(session_in(folder, told=told, is_resumed=True, **common))
        return row["training"], told.values("loss/eval")
    raise AssertionError("it wasn't stopped")


@pytest.mark.parametrize(("option", "in_shards"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_ranks_end_together(tmp_path: Path, option: str, in_shards: bool) -> None:
    wanted, wanted_evals = trained_on_ranks(tmp_path / "one", {}, in_shards)
    for row, evals in on_ranks(trained_on_ranks, tmp_path / "two", {"sharding": option}, in_shards):
        assert row == wanted | {"best_value": pytest.approx(wanted["best_value"], rel=1e-4)}
        assert len(evals) == len(wanted_evals)
    ours, theirs = (load(tmp_path / name / "model").state_dict() for name in ("one", "two"))
    assert relative_error(ours, theirs) < 1e-2


@pytest.mark.parametrize(
    ("best", "sentence"),
    [
        ("loss/train", "null or a figure that this run's evaluations have: loss/eval, eval/perplexity, eval/accuracy,"),
        ("eval/mine", "eval/mine:max if a larger one is better, or eval/mine:min"),
        ("eval/accuracy_early", "eval/accuracy_early:max if a larger one is better"),  # as that isn't lowvram's here
        ("eval/accuracy:min", "must be eval/accuracy, of which a larger one is better"),
        ("loss/eval:max", "must be loss/eval, of which a smaller one is better"),
    ],
)
def test_a_figure_that_is_not_there_or_not_sure_is_refused(make_session: MakeSession, best: str, sentence: str) -> None:
    metrics = [f"tests.loops.test_ending.{name}" for name in ("mine", "accuracy_early")]
    with pytest.raises(BadInput) as refusal:
        Train().run(make_session(metrics=metrics, best=best, eval_every=2))
    assert str(refusal.value).startswith(f"snapshot.best={best!r}: must be ")
    assert sentence in str(refusal.value)


def test_figures_by_their_names(make_session: MakeSession) -> None:
    for text, figure in (
        ("eval/loss", Figure("loss/eval", Better.SMALLER)),
        ("eval/accuracy", Figure("eval/accuracy", Better.LARGER)),
        ("eval/perplexity:min", Figure("eval/perplexity", Better.SMALLER)),
        ("eval/mine:max", Figure("eval/mine", Better.LARGER)),
    ):
        assert figure_of(make_session(metrics=["tests.loops.test_ending.mine"], best=text)) == figure
    assert figure_of(make_session()) is None


def test_patience_counts_evaluations_without_a_gain() -> None:
    best = Best(Figure("eval/f1", Better.LARGER), patience=3)
    for step, value, num_since in (
        (1, math.nan, 1),
        (2, 0.5, 0),
        (3, 0.5, 1),
        (4, math.inf, 2),
        (5, 0.6, 0),
        (6, 0.1, 1),
        (7, 0.6, 2),
    ):
        best.observe(step, {"eval/f1": value})
        assert (best.num_since, best.is_over) == (num_since, False), step
    again = Best(best.figure, best.patience)
    again.restore(best.state())
    again.observe(8, {"eval/f1": math.nan})
    assert (again.step, again.value, again.is_over) == (5, 0.6, True)
    other = Best(Figure("loss/eval", Better.SMALLER), best.patience)
    other.restore(best.state())  # of another figure
    assert (other.step, other.num_since) == (None, 0)


def test_hours_count_over_all_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that is 1000 s further whenever somebody looks at it."""
    now = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: next(now)))
    hours = Hours(2.0)
    hours.begin()
    assert [hours.is_over() for _ in range(8)] == [False] * 7 + [True]
    later = Hours(3.2)
    later.restore(hours.state())
    later.begin()
    assert [later.is_over() for _ in range(2)] == [False, True]
    assert Hours(None).state() == {}


def test_a_run_ends_normally_when_its_time_is_over(make_session: MakeSession) -> None:
    """After one step at least, and at once when it goes on."""
    for is_resumed in (False, True):
        told = Told()
        row = Train().run(make_session(told=told, max_hours=1e-9, steps=9, is_resumed=is_resumed))
        assert row["training"]["ended_by"] == "max_hours"
        assert row["training"]["steps"] == row["training"]["exported_step"] == 1
        assert [step for step, _ in told.values("loss/eval")] == [1]
    assert Train().run(make_session(steps=9, is_resumed=True))["training"]["ended_by"] == "steps"
