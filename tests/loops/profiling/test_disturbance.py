"""What disturbs a measurement is seen: others on the processor or the card, a lowered clock, times that spread."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowvram.core.rig import Rig
from lowvram.loops.measure import Measure
from lowvram.loops.profiling import disturbance
from lowvram.loops.profiling.disturbance import CardWatch, DisturbanceWatch, ProcessorWatch, spreads, watch_for
from lowvram.loops.session import Session
from tests.laboratory import CPU, needs_gpu

MakeSession = Callable[..., Session]
SCHEDSTAT = Path("/proc/self/schedstat")
needs_account = pytest.mark.skipif(
    not SCHEDSTAT.exists() or SCHEDSTAT.read_text().split()[0] == "0", reason="this kernel keeps no account of waiting"
)


class Quiet(DisturbanceWatch):
    """Nothing disturbs."""

    def reasons(self) -> Iterator[str]:
        return iter(())


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@needs_account
def test_another_process_on_the_processor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants the same core all along, so it has half of it at least."""
    monkeypatch.setattr(disturbance, "has_company", lambda: False)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    other = multiprocessing.get_context("fork").Process(target=spin, args=(30,))
    try:
        other.start()
        watch = watch_for(CPU)
        spin(0.4)
        (reason,) = watch.reasons()
    finally:
        other.kill()
        other.join()
        os.sched_setaffinity(0, before)
    assert reason.startswith("other processes had the processor for ")
    assert 20 < int(reason.removesuffix("% of the time").rpartition(" ")[2]) < 100


def test_what_does_not_wait_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = iter([(5_000, 100_000), (9_000, 1_000_000)])  # waited, ran: the first are from before the window
    monkeypatch.setattr(ProcessorWatch, "_waited_and_ran", lambda self: next(accounts))
    assert list(ProcessorWatch().reasons()) == []


def test_the_points_own_processes_are_no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks, a loader's workers: what they take of the processor is the point's own."""
    monkeypatch.setattr(ProcessorWatch, "_waited_and_ran", lambda self: next(accounts))
    for is_of_the_point in (False, True):
        accounts = iter([(0, 0), (900, 100)])
        monkeypatch.setattr(disturbance, "has_company", lambda found=is_of_the_point: found)
        assert bool(list(ProcessorWatch().reasons())) is not is_of_the_point
    monkeypatch.undo()
    other = multiprocessing.get_context("fork").Process(target=spin, args=(30,))
    other.start()
    assert disturbance.has_company()
    other.kill()
    other.join()


@pytest.mark.parametrize(
    ("step_ms", "is_seen"),
    [([100.0] * 10, False), ([100.0, 109.0] * 5, False), ([100.0] * 5 + [130.0] * 5, True), ([100.0], False)],
)
def test_times_that_spread_are_seen(step_ms: list[float], is_seen: bool) -> None:
    assert bool(list(spreads(step_ms))) is is_seen


@pytest.mark.parametrize("slow", [False, True])
def test_the_row_says_so(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Of a window with one slow step; the others last long enough for what else the machine does not to matter."""
    monkeypatch.setattr("lowvram.loops.measure.watch_for", lambda device: Quiet())
    waits_s = iter([0.0, 0.2, 0.6 if slow else 0.2, 0.2, *[0.0] * 10])
    session = make_session()
    run = session.rig.run

    def waiting(rig: Rig, *args: Any) -> Any:
        time.sleep(next(waits_s))
        return run(rig, *args)

    row = Measure().run(replace(session, rig=replace(session.rig, run=waiting)))
    assert ("disturbed" in row) is slow
    if slow:
        assert row["disturbed"].startswith("steps took up to ")


def test_steps_of_different_sizes_may_take_different_times() -> None:
    alike, different = ([torch.tensor([8, 10]), torch.tensor([9, places])] for places in (10, 20))
    found = [disturbance.disturbance(Quiet(), [100.0, 200.0], token_counts) for token_counts in (alike, different)]
    assert found[0].keys() == {"disturbed"}
    assert found[1] == {}


class Nvml:
    """pynvml, as far as it is asked."""

    class NVMLError(Exception): ...

    def __init__(self, num_processes: int, mask: int) -> None:
        self.nvmlDeviceGetComputeRunningProcesses = lambda _: [SimpleNamespace(pid=1)] * num_processes
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: mask


@pytest.mark.parametrize(
    ("num_processes", "mask", "expected"),
    [
        (1, 0x4, []),  # itself, at its power limit
        (3, 0, ["2 other processes computed on the device"]),
        (
            0,
            0x48,
            ["the device's clock was lowered by the hardware", "the device's clock was lowered by heat, by hardware"],
        ),
    ],
)
def test_a_card_is_asked(monkeypatch: pytest.MonkeyPatch, num_processes: int, mask: int, expected: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(num_processes, mask))
    monkeypatch.setattr("lowvram.loops.profiling.disturbance.nvml_handle", lambda index: index)
    assert list(CardWatch(torch.device("cuda", 0)).reasons()) == expected


def test_a_card_that_cannot_be_asked_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list(CardWatch(torch.device("cuda", 0)).reasons()) == []


@pytest.mark.gpu
@needs_gpu[1]
def test_a_card_of_our_own_is_quiet() -> None:
    assert isinstance(watch_for(torch.device("cuda")), CardWatch)
    assert not [reason for reason in watch_for(torch.device("cuda")).reasons() if "processes" in reason]
