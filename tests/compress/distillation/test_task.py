"""Distillation from the command line: a teacher, a student beside it, a cache, and a student without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.calls import TINY, TINY_RESNET, Outcome

Call = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("words", "larger"),
    [
        pytest.param(TINY, "model.width=48", id="transformer"),
        pytest.param(TINY_RESNET, "model.width=16", id="resnet", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_a_student_and_a_cache(call: Call, words: tuple[str, ...], larger: str) -> None:
    teacher = call(*words, larger).folder
    distill = ("task=distill", "task.values=fp32", "task.top=1000")
    live = call(*words, *distill, f"task.teacher={teacher}").row
    outcome = call(*words, *distill, f"task.teacher={teacher}", "mode=teach", "train.batch_size=6", "train.steps=2")
    cache, taught = outcome.folder, outcome.row
    assert (cache / "cache" / "cache.json").is_file()
    assert "bytes each" in outcome.out
    assert taught["plan"]["reason"] == "plans are of training, and mode=teach trains nothing"
    cached = call(*words, *distill, f"task.cache={cache}").row
    for row in (live, cached):
        assert row["plan"]["allocated_bytes"] == row["memory"]["peak_bytes"]
    of_live, of_cached = (row["memory"]["by_kind_max"]["parameters"] for row in (live, cached))
    assert of_cached < of_live
    for name in ("first", "last", "eval"):
        assert cached["loss"][name] == pytest.approx(live["loss"][name], rel=1e-5)


def test_a_mode_that_has_nobody_to_ask_is_refused(call: Call) -> None:
    refused = call(*TINY, "mode=teach")
    assert refused.code == 3
    assert "mode='teach': must be train, unless task=distill names a teacher" in refused.err


@pytest.mark.slow  # tests/compress/distillation/test_features.py needs no processes
def test_blocks_learn_from_those_of_a_run_as_planned(call: Call) -> None:
    teacher = call(*TINY, "model.num_layers=2").folder
    words = (*TINY, "task=distill", f"task.teacher={teacher}", "task.feature_weight=1")
    row = call(*words, "precision=bf16", "ckpt=every1", "accum=x2").row
    assert row["status"] == "ok"
    assert row["plan"]["allocated_bytes"] == row["memory"]["peak_bytes"]
    narrower = call(*words, "model.width=8").row
    assert narrower["plan"]["allocated_bytes"] == narrower["memory"]["peak_bytes"]
