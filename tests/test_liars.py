"""Well-known lies of benchmarks, planted: each is flagged in the row, or can't be told at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowvram.config import identity
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.loops.fields import Fields, merged, pace, times
from lowvram.loops.measure import Measure
from lowvram.loops.profiling.clock import CudaClock, HostClock
from lowvram.loops.profiling.compile_time import compile_fields
from lowvram.loops.profiling.post_run import post_run
from lowvram.loops.session import Session
from lowvram.results.checks import failed_checks
from lowvram.results.row import Row, empty_row, merge, write
from lowvram.worker import main as child
from lowvram.worker.mfu import model_flops
from tests.calls import TINY, Outcome
from tests.laboratory import CPU, PROBLEMS, compiler_as_before, knobs_of, make_batch
from tests.loops.sessions import session_in
from tests.planted import Forgetful, MeanOfMeans
from tests.runs.test_remeasure import measured
from tests.test_laws import CHANGED, error_of, keeps_the_numbers

Call = Callable[..., Outcome]
MakeSession = Callable[..., Session]
SHORT = ("mode=measure", "measure.steps=2", "measure.warmup_steps=1")
CONFIG = {"vram": None, "train": {"batch_size": 4}, "data": {"sequence_length": 8}}
HONEST: Fields = {
    "status": "ok",
    "choices": {"compile": "none"},
    "config": CONFIG,
    "compiled": False,
    "memory": {"peak_bytes": 2**30, "source": "cuda_allocator", "steady_peak_bytes": 2**30 - 2**20},
    "throughput": {"samples_per_s": 40.0, "tokens_per_s": 240.0, "mfu": 0.5},
    "data": {"padding": 0.25},
    "time": {"step_ms_p05": 95.0, "step_ms_p50": 100.0, "step_ms_p95": 105.0}
    | {"forward_ms": 30.0, "backward_ms": 60.0, "update_ms": 10.0},
}


def told(**lies: Fields) -> list[str]:
    """What is said of an honest row in which something was changed."""
    row: Row = merge(merge(empty_row(), HONEST), lies)
    return list(failed_checks(row))


@pytest.fixture
def make_session(tmp_path: Path) -> MakeSession:
    return lambda *args, **kwargs: session_in(tmp_path, *args, **kwargs)


def test_an_honest_row_is_believed() -> None:
    assert told() == []
    assert list(failed_checks(empty_row())) == []


# No synchronise.


class Card:
    """A device that does what it is asked later: the host goes on at once."""

    def __init__(self) -> None:
        self.asked_ms = 0.0
        self.is_done = False
        card = self

        class Event:
            def __init__(self, **_: Any) -> None: ...

            def record(self) -> None:
                self.at_ms, card.is_done = card.asked_ms, False

            def elapsed_time(self, later: Event) -> float:
                if not card.is_done:  # as CUDA's
                    raise RuntimeError("Both events must be recorded and completed before calculating elapsed time.")
                return later.at_ms - self.at_ms

        self.Event = Event

    def synchronize(self, *_: Any) -> None:
        self.is_done = True


def test_a_device_that_was_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock tells its time or nothing at all; the host's, which sees no work, is found out by the phases."""
    card = Card()
    monkeypatch.setattr(torch, "cuda", card)
    honest, lying = CudaClock(), HostClock()
    for _ in range(2):
        with honest.lap("step"), lying.lap("step"):
            card.asked_ms += 100.0
    assert honest.laps_ms("step") == [100.0, 100.0]
    assert max(lying.laps_ms("step")) < 50
    monkeypatch.setattr(card, "synchronize", lambda *_: None)
    card.is_done = False
    with pytest.raises(RuntimeError, match="completed before"):
        honest.laps_ms("step")
    (found,) = told(
        time={"step_ms_p05": 1.0, "step_ms_p50": 1.0}, throughput={"samples_per_s": 4000.0, "tokens_per_s": 1}
    )
    assert "not waited for" in found


def test_phases_that_a_busy_cpu_stretched_are_no_contradiction() -> None:
    """There nothing is asynchronous: what isn't waited for doesn't exist."""
    memory = HONEST["memory"] | {"source": "tensor_ledger"}
    assert told(memory=memory, time={"forward_ms": 300.0, "backward_ms": 600.0}) == []


# Warm-up in the mean; the best of several.


def with_waits(session: Session, *waits_s: float) -> Session:
    """Whose steps take so long at least."""
    left, run = iter(waits_s), session.rig.run

    def waiting(*args: Any) -> Any:
        time.sleep(next(left, 0.0))
        return run(*args)

    return replace(session, rig=replace(session.rig, run=waiting))


def test_warm_up_in_the_mean(make_session: MakeSession) -> None:
    """The one step of warm-up takes two seconds; no figure of time knows."""
    row = Measure().run(with_waits(make_session(), 2.0))
    assert row["time"]["step_ms_p95"] < 1000
    assert row["throughput"]["samples_per_s"] > 4 / 1.0


def test_the_best_of_several_steps(make_session: MakeSession) -> None:
    found = times(make_session(batch_size=4), [100.0, 100.0, 400.0], [0.0] * 3, [torch.tensor([8, 8])] * 3)
    assert found["throughput"]["samples_per_s"] == pytest.approx(3 * 4 / 0.6)
    (doubt,) = told(throughput={"samples_per_s": 4 / 0.08, "tokens_per_s": 1.0})
    assert "more than in the fastest steps" in doubt


def test_the_best_of_several_measurements(tmp_path: Path) -> None:
    row, _ = measured(tmp_path, ("noise", 1.0), ("noise", 5.0), ("noise", 9.0))
    assert row["time"]["step_ms_p50"] == 9.0
    assert [one["step_ms_p50"] for one in row["reruns"]] == [1.0, 5.0]


# A peak that was reset too late.


class Allocator(Card):
    """Of a card: setting up took 900 bytes at its peak, a step takes 700."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 900
        self.max_memory_allocated = self.max_memory_reserved = lambda: self.peak_bytes
        self.mem_get_info = lambda: (1000, 2000)
        self.memory_stats = lambda: {"num_alloc_retries": 0, "inactive_split_bytes.all.peak": 0}
        self.is_available = lambda: False  # an optimizer of torch 2.11 asks

    def reset_peak_memory_stats(self) -> None:
        self.peak_bytes = 700


def test_a_peak_that_was_reset_too_late(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session()
    batches = session.batches(0)
    monkeypatch.setattr(torch, "cuda", Allocator())
    on_card = replace(session, rig=replace(session.rig, device=torch.device("cuda")))
    memory = post_run(on_card, batches)["memory"]
    assert (memory["peak_bytes"], memory["steady_peak_bytes"]) == (900, 700)
    assert memory["beyond_tensors_bytes"] == 700 - sum(memory["by_kind"].values())
    (found,) = told(memory={"peak_bytes": 2**28})
    assert found.startswith("the peak was reset too late: one step held 0.999 GiB, the whole run 0.250 GiB")


# A dirty process.


@pytest.mark.slow
def test_a_dirty_process(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A point after a large one has the figures of one alone; where points would share a process they are refused or
    marked; and a fork server that has touched CUDA starts none."""
    alone = call(*TINY, *SHORT, "train.batch_size=2", "hydra.run.dir=alone").row
    rows = call("-m", *TINY, *SHORT, "train.batch_size=512,2", "hydra.sweep.dir=sweep").rows
    large, after = rows["batch_size512"], rows["batch_size2"]
    assert after["memory"]["peak_bytes"] == alone["memory"]["peak_bytes"]
    grown = [row["memory"]["process_peak_bytes"] for row in (alone, after, large)]
    assert abs(grown[1] - grown[0]) < (grown[2] - grown[0]) / 4
    assert "must be child for 2 points" in call("-m", *TINY, "process=inline", "seed=1,2").sentence
    monkeypatch.setattr(child, "is_in_bad_fork", lambda: True)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr("faulthandler.enable", lambda **_: None)
    monkeypatch.setattr(child, "write_proc", lambda *_: None)
    with pytest.raises(RuntimeError, match="the fork server has touched CUDA"):
        child.prepare(tmp_path / "log")


# Padding counted; recompute counted as model FLOPs.


def test_padding_that_is_counted(make_session: MakeSession) -> None:
    """Eight places a sample, two of which hold no token."""
    found = pace(make_session(batch_size=4), [torch.tensor([24, 32])], seconds=0.1)
    assert found["throughput/tokens_per_s"] == pytest.approx(240.0)
    assert told(throughput={"tokens_per_s": found["throughput/tokens_per_s"]}) == []
    (doubt,) = told(throughput={"tokens_per_s": 320.0})
    assert doubt.startswith("padding was counted")


@pytest.mark.parametrize(("target_length", "most"), [(None, 480.0), (4, 360.0)])
def test_the_tokens_of_both_texts_of_a_pair_count(target_length: int | None, most: float) -> None:
    config = {**CONFIG, "data": {"sequence_length": 8, "target_length": target_length}}
    assert told(config=config, throughput={"tokens_per_s": most}) == []
    assert len(told(config=config, throughput={"tokens_per_s": 1.1 * most})) == 1


def test_recompute_that_is_counted_as_the_models_arithmetic() -> None:
    problem, knobs = PROBLEMS["transformer"], knobs_of(ckpt="every1")
    with FlopCounterMode(display=False) as lying:
        step(assemble(problem, knobs, CPU), make_batch(problem.spec, 1))
    with FlopCounterMode(display=False) as plain:
        step(assemble(problem, knobs_of(), CPU), make_batch(problem.spec, 1))
    assert lying.get_total_flops() > 1.2 * plain.get_total_flops()
    assert model_flops(problem, knobs) == model_flops(problem, knobs_of())
    (doubt,) = told(throughput={"mfu": 1.25})
    assert "more than the model's arithmetic" in doubt


# Accumulation that changes the batch; a wrong denominator of the loss.


@pytest.mark.parametrize("lie", [Forgetful(), MeanOfMeans()], ids=["changes-the-batch", "wrong-denominator"])
def test_accumulation_that_changes_what_is_learnt(lie: Any) -> None:
    error = error_of("sharding", lie, "transformer", torch.float32)
    assert error > CHANGED
    assert not keeps_the_numbers(lie, error, "transformer", torch.float32)


def test_accumulation_that_changes_what_is_learnt_in_the_row(call: Call) -> None:
    """And one that would need a larger batch is refused."""
    row = call(*TINY, *SHORT, "measure.fidelity=true", "measure.fidelity_steps=1", "accum=x2", "name=Forgetful").row
    assert row["fidelity"]["gradient_error"] > 0.5
    refused = call(*TINY, *SHORT, "accum=x2", "accum.parts=5").sentence
    assert refused.startswith("train.batch_size=4: must be at least accum.parts=5, a sample for each part")


# A stale row shown as new.


@pytest.mark.slow
def test_a_stale_row_that_is_shown_as_new(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept one says where it was measured; with another torch it is none of this sweep's points."""
    words = ("-m", *TINY, *SHORT, "seed=1", "hydra.sweep.dir=sweep")
    row = call(*words).row
    stale = {**row, "provenance": {**row["provenance"], "git_sha": "0123456789abcdef"}}
    write(tmp_path / "sweep" / row["id"], stale)
    again = call(*words)
    assert "started" not in again.out
    assert ": measured at 0123456789abcdef" in again.out
    versions = identity.installed_version
    monkeypatch.setattr(identity, "installed_version", lambda name: f"{versions(name)}.1")
    assert "started" in call(*words).out
    assert len(list(tmp_path.glob("sweep/*/result.json"))) == 2


# A compiled point measured eager; a budget that isn't enforced.


def test_a_compiled_point_that_is_measured_eager(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler_as_before(), torch.compiler.set_stance("force_eager"):
        session = make_session(choices={"compile": "blocks"})
        monkeypatch.setattr("lowvram.loops.profiling.compile_time.compile_seconds", lambda: 0.0)
        row = Measure().run(session)
        assert "by_kind" not in row["memory"]
        with pytest.raises(RuntimeError, match="nothing was compiled"):
            merged(row, compile_fields(session))
    assert told(choices={"compile": "blocks"}) == ["compile=blocks was measured eager"]


@pytest.mark.slow
def test_a_budget_that_is_not_enforced(call: Call) -> None:
    """The same point under a cap that binds, and with the cap taken away behind the program's back."""
    large = (*TINY, *SHORT, "train.batch_size=256", "data.sequence_length=64", "vram=24MiB")
    assert call(*large).row["status"] == "oom"
    row = call(*large, "name=uncap@1").row
    assert row["status"] == "ok"
    assert "vram=24MiB was not enforced: the peak was " in row["disturbed"]
    assert row["memory"]["peak_bytes"] > 24 * 2**20
