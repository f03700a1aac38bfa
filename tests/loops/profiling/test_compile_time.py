"""Compiled points: what compiling took is a figure of its own, and no dispatch mode looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lowvram.core.knob import is_compiled
from lowvram.loops.measure import Measure
from lowvram.loops.profiling import compile_time as compiling
from lowvram.loops.profiling.compile_time import CompileTimes, chosen, compile_fields, compile_seconds
from lowvram.loops.session import Session
from lowvram.loops.train import SETTLING_STEPS, Train
from tests.calls import TINY, Outcome
from tests.laboratory import compiler_as_before
from tests.loops.sessions import Told
from tests.tiers import first_of

pytestmark = pytest.mark.medium

MakeSession = Callable[..., Session]


@pytest.fixture
def quickly() -> Iterator[None]:
    """Without inductor."""
    with compiler_as_before(), torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield


@pytest.mark.parametrize(
    ("choice", "expected"), [("none", False), ("torchscript", False), ("blocks", True), ("model", True)]
)
def test_who_is_compiled(make_session: MakeSession, choice: str, expected: bool) -> None:
    with compiler_as_before():
        assert is_compiled(make_session(choices={"compile": choice}).knobs.values()) is expected


def test_a_step_in_which_something_was_compiled_is_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 4.0, 4.0, 9.0, 9.5, 9.5, 9.5])  # before and after each step; compiled between them too
    monkeypatch.setattr(compiling, "compile_seconds", lambda: next(clock))
    times = CompileTimes()
    for _ in range(4):
        with times.step():
            pass
    assert times.seconds == [4.0, 0.0, 0.5, 0.0]
    assert times.steady(0) == [1, 3]
    assert times.steady(2) == [3]
    assert chosen("abcd", times.steady(0)) == ["b", "d"]


def test_what_was_to_be_compiled_and_was_not_is_an_error(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_seconds", lambda: 0.0)
    assert compile_fields(make_session()) == {"compiled": False, "time": {"compile_s": None}}
    with compiler_as_before(), pytest.raises(RuntimeError, match="nothing was compiled"):
        compile_fields(make_session(choices={"compile": "blocks"}))


@pytest.mark.parametrize("mode", first_of([Train(), Measure()]), ids=["train", "measure"])
@pytest.mark.slow
def test_a_compiled_run_has_memory_of_the_process_alone(
    make_session: MakeSession, mode: Train | Measure, quickly: None
) -> None:
    before, told = compile_seconds(), Told()
    session = make_session(choices={"compile": "blocks", "ckpt": "every2"}, told=told)
    row = mode.run(session)
    memory, took_s = row["memory"], compile_seconds() - before
    assert memory["source"] == "process"
    assert memory["peak_bytes"] == memory["process_peak_bytes"] > 0
    assert "by_kind" not in memory
    assert memory["by_kind_reason"] == compiling.NO_KINDS
    assert took_s > 0
    expected = 3 if isinstance(mode, Measure) else session.settings.train.steps - SETTLING_STEPS
    assert row["time"]["steps"] == expected
    assert row["time"]["step_ms_p95"] < 1e3 * took_s
    assert compile_fields(session)["compiled"] is True
    if isinstance(mode, Train):
        assert max(ms for _, ms in told.values("time/step_ms")) < 1e3 * took_s


@pytest.mark.slow
def test_a_sweep_over_compile_marks_what_cannot_be_compared(call: Callable[..., Outcome]) -> None:
    """The real command line, with inductor, in a fresh process for each point."""
    outcome = call("-m", *TINY, "compile=none,blocks", "mode=measure", "measure.warmup_steps=1", "measure.steps=2")
    assert outcome.code == 0, outcome.said()
    eager, compiled = outcome.rows["none"], outcome.rows["blocks"]
    assert (eager["compiled"], compiled["compiled"]) == (False, True)
    assert eager["time"]["compile_s"] is None
    assert compiled["time"]["step_ms_p95"] < 1e3 * compiled["time"]["compile_s"] < 1e3 * compiled["time"]["total_s"]
    assert (eager["memory"]["source"], compiled["memory"]["source"]) == ("tensor_ledger", "process")
    assert compiled["memory"]["by_kind"] is compiled["memory"]["by_kind_max"] is None
    assert compiled["memory"]["by_kind_reason"]
    assert compiled["loss"]["last"] == pytest.approx(eager["loss"]["last"], rel=1e-5)
    assert "growth of the process" in outcome.out
    assert "tensor bytes on CPU" in outcome.out
