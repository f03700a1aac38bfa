"""mode=measure without a parent: warm-up, a window, and the same losses as training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowvram.loops.measure import Measure
from lowvram.loops.session import NonFinite, Session
from lowvram.loops.train import Train
from tests.loops.sessions import Told

MakeSession = Callable[..., Session]


def test_a_window_comes_after_the_warm_up(make_session: MakeSession) -> None:
    told = Told()
    row = Measure().run(make_session(told=told))
    assert [step for step, _ in told.values("loss/train")] == [1, 2, 3, 4]
    assert row["time"]["steps"] == 3
    assert row["time"]["is_cut"] is False
    assert row["time"]["step_ms_p05"] <= row["time"]["step_ms_p50"] <= row["time"]["step_ms_p95"]
    assert 0 <= row["time"]["data_wait_frac"] <= 1
    assert row["throughput"]["samples_per_s"] > 0
    assert row["loss"]["first"] == told.values("loss/train")[0][1]
    assert row["loss"]["last"] == told.values("loss/train")[-1][1]
    assert row["loss"]["eval"] > 0


@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
def test_measuring_is_training(make_session: MakeSession, problem: str) -> None:
    """The same step on the same batches: the same losses, to the last digit."""
    measured, trained = Told(), Told()
    Measure().run(make_session(problem, told=measured))
    Train().run(make_session(problem, told=trained, steps=4))
    assert measured.values("loss/train") == trained.values("loss/train")


def test_a_window_ends_in_time_and_says_so(make_session: MakeSession) -> None:
    session = make_session()
    limits = replace(session.settings.measure, steps=10**6, max_seconds=1e-9)
    row = Measure().run(replace(session, settings=replace(session.settings, measure=limits)))
    assert row["time"] == row["time"] | {"steps": 0, "is_cut": True}
    assert "throughput" not in row


def test_no_weights_are_left(make_session: MakeSession) -> None:
    session = make_session(snapshot_every=1)
    Measure().run(session)
    assert {path.name for path in session.folder.iterdir()} == {"metrics.jsonl", "memory_over_step.csv"}


def test_numbers_that_are_none_end_it(make_session: MakeSession) -> None:
    session = make_session("resnet")
    with torch.no_grad():
        next(session.rig.model.parameters()).fill_(math.nan)
    with pytest.raises(NonFinite, match="not finite"):
        Measure().run(session)
