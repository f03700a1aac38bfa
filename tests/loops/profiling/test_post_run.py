"""What is measured last: phases and kinds, without another number in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread
from typing import Any, cast

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.phases import Marks, with_phases
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.knobs.stepping import AfterBackwardStepper
from lowvram.loops.profiling import post_run as profiling
from lowvram.loops.profiling.clock import HostClock
from lowvram.loops.profiling.post_run import phase_times, post_run, run_peaks
from lowvram.loops.session import Events, Session
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, relative_error

CHOICES: list[dict[str, str | Knob]] = [{}, {"accum": "x4", "precision": "fp16", "ckpt": "every1"}]


@pytest.mark.parametrize("choices", CHOICES, ids=["plain", "together"])
def test_a_timed_rig_has_the_same_numbers(choices: dict[str, str | Knob]) -> None:
    problem = PROBLEMS["transformer_dropout"]
    results = []
    for is_timed in (False, True):
        rig = assemble(problem, knobs_of(**choices), CPU)
        torch.manual_seed(0)
        watched = with_phases(rig, HostClock()) if is_timed else rig
        told = [step(watched, make_batch(problem.spec, 8, seed)) for seed in range(2)]
        results.append((told, str(rig.stepper.state_dict()), rig.model.state_dict()))
    (*plain, weights), (*watched, watched_weights) = results
    assert plain == watched
    assert relative_error(watched_weights, weights) == 0


def test_phases_are_marked_part_by_part() -> None:
    problem = PROBLEMS["transformer"]
    clock, rig = HostClock(), assemble(problem, knobs_of(accum="x4"), CPU)
    step(with_phases(rig, clock), make_batch(problem.spec, 8))
    assert len(clock.laps_ms("forward")) == len(clock.laps_ms("backward")) == 4
    assert len(clock.laps_ms("update")) == 1


def test_a_timed_stepper_has_the_inner_ones_state() -> None:
    problem = PROBLEMS["transformer"]
    rig = assemble(problem, knobs_of(precision="fp16"), CPU)
    outer = with_phases(rig, HostClock()).stepper
    outer.load_state_dict({**outer.state_dict(), "scale": 4.0})
    assert rig.stepper.state_dict()["scale"] == 4.0


def test_a_timed_stepper_passes_on_what_it_is_reported() -> None:
    rig = assemble(PROBLEMS["transformer"], knobs_of(), CPU)
    outer, inner = with_phases(rig, HostClock()).stepper, rig.stepper
    assert isinstance(inner, AfterBackwardStepper)
    outer.begin(3, divisor=8.0)
    outer.set_lr(0.25)
    assert inner.divisor == 8.0
    assert {group["lr"] for group in inner.optimizer.param_groups} == {0.25}


def test_every_phase_has_a_time() -> None:
    problem = PROBLEMS["transformer"]
    found, num_steps = phase_times(assemble(problem, knobs_of(), CPU), make_batch(problem.spec, 4))
    assert 1 <= num_steps <= 3
    assert found.keys() == {"forward_ms", "backward_ms", "update_ms"}
    assert all(ms > 0 for ms in found.values())


class Told(Marks):
    """A clock that says of each phase what it is to say."""

    def mark(self, label: str) -> None:
        del label

    def laps_ms(self, label: str) -> list[float]:
        return {"forward": [1.0, 2.0], "backward": [4.0], "weights": [8.0], "update": [16.0]}[label]


def test_what_a_backward_pass_leaves_for_later_is_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "clock_for", lambda device: Told())
    problem = PROBLEMS["transformer"]
    found, _ = phase_times(assemble(problem, knobs_of(), CPU), make_batch(problem.spec, 4))
    assert found == {"forward_ms": 3.0, "backward_ms": 12.0, "update_ms": 16.0}


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_the_row_gets_phases_and_memory(make_session: Callable[..., Session], problem: str) -> None:
    session = make_session(problem)
    batches = session.batches(0)
    found = post_run(session, batches)
    memory = found["memory"]
    assert memory["source"] == "tensor_ledger"
    assert sum(memory["by_kind"].values()) == memory["peak_bytes"]
    assert memory["by_kind"].keys() == memory["by_kind_max"].keys()
    parameters = sum(4 * parameter.numel() for parameter in session.rig.model.parameters())
    assert memory["by_kind_max"]["parameters"] >= parameters
    assert memory["host_peak_bytes"] >= memory["process_peak_bytes"] > 0
    with pytest.raises(StopIteration):
        next(batches)


def test_what_moves_in_a_step_is_reported_where_something_does(make_session: Callable[..., Session]) -> None:
    plain, offloaded = make_session(), make_session(choices={"offload": "activations"})
    told = [post_run(session, session.batches(0)) for session in (plain, offloaded)]
    assert told[0]["traffic"] == {}
    travelled = told[1]["traffic"]
    assert travelled["to_host_bytes"] == travelled["to_device_bytes"] > 0
    assert travelled["to_host_bytes"] <= told[1]["memory"]["by_kind_max"]["host"]
    assert travelled["waited_ms"] > 0


def test_a_run_that_fitted_stays_so_if_the_extra_steps_do_not_fit(make_session: Callable[..., Session]) -> None:
    """At whatever extra step memory runs out: what was told before stays."""
    session, told = make_session(), []
    for num_fitting in (0, 2, 3):
        steps = iter([True] * num_fitting)

        def forward(part: Part, steps: Iterator[bool] = steps) -> Any:
            if not next(steps, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return session.rig.forward(part)

        limited = replace(session, rig=replace(session.rig, forward=forward))
        told.append(post_run(limited, session.batches(0)))
    assert [set(found) for found in told] == [{"memory"}, {"memory"}, {"memory", "time", "traffic"}]
    assert all("by_kind" not in found["memory"] and found["memory"]["by_kind_reason"] for found in told)
    assert told[0]["memory"]["host_peak_bytes"] > 0


HELD_BYTES = 100 * 2**20


def test_memory_that_no_tensor_of_the_step_explains_is_reported(make_session: Callable[..., Session]) -> None:
    """Tensors of another thread: the ledger, which is a mode of its own thread, sees none of them."""
    plain, threaded = make_session(), make_session()
    held: list[torch.Tensor] = []

    def forward(part: Part) -> Any:
        thread = Thread(target=lambda: held.append(torch.ones(HELD_BYTES // 4)))
        thread.start()
        thread.join()
        return threaded.rig.forward(part)

    sessions = plain, replace(threaded, rig=replace(threaded.rig, forward=forward))
    expected, memory = (post_run(session, session.batches(0))["memory"] for session in sessions)
    assert memory["peak_bytes"] == expected["peak_bytes"]
    assert expected["beyond_tensors_bytes"] < HELD_BYTES / 10
    assert memory["beyond_tensors_bytes"] >= HELD_BYTES
    assert held


class Card:
    """torch.cuda, as far as `run_peaks` asks it."""

    max_memory_allocated = staticmethod(lambda: 700)
    max_memory_reserved = staticmethod(lambda: 1000)
    mem_get_info = staticmethod(lambda: (100, 5000))
    memory_stats = staticmethod(lambda: {"num_alloc_retries": 2, "inactive_split_bytes.all.peak": 250})


def test_a_card_tells_what_it_has_reserved_in_vain(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    on_card = replace(session, rig=replace(session.rig, device=torch.device("cuda")))
    monkeypatch.setattr(torch, "cuda", Card)
    told = run_peaks(on_card)
    assert told["fragmentation_bytes"] == 300
    assert told["inactive_split_bytes"] == 250
    assert told["alloc_retries"] == 2
    assert told["peak_bytes"] == 700


def test_memory_is_the_same_in_every_run(make_session: Callable[..., Session]) -> None:
    peaks = [post_run(session, session.batches(0))["memory"] for session in (make_session(), make_session())]
    assert peaks[0]["peak_bytes"] == peaks[1]["peak_bytes"]
    assert peaks[0]["by_kind_max"] == peaks[1]["by_kind_max"]


def test_the_memory_over_the_step_is_sent_for_the_report(make_session: Callable[..., Session]) -> None:
    sent: dict[str, Any] = {}
    session = make_session()

    def events(event: str, **fields: Any) -> None:
        sent[event] = fields

    found = post_run(replace(session, events=cast("Events", events)), session.batches(0))
    told = sent["memory_over_step"]
    of_host = 2 + told["kinds"].index("host")
    sums = [sum(moment[2:]) - moment[of_host] for moment in told["moments"]]
    assert max(sums) == found["memory"]["peak_bytes"]
    assert {moment[1] for moment in told["moments"]} >= {"forward", "backward", "update"}
