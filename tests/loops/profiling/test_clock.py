"""Laps, and what lies between them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lowvram.loops.profiling.clock import Clock, CudaClock, HostClock, clock_for, synchronise
from tests.laboratory import CPU, needs_gpu


class Counted(Clock):
    """A clock whose moments are told beforehand, in milliseconds."""

    def __init__(self, *moments: float) -> None:
        super().__init__()
        self.left: Iterator[float] = iter(moments)
        self.moments: list[float] = []

    def _note_moment(self) -> None:
        self.moments.append(next(self.left))

    def _intervals_ms(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]


def test_a_mark_lasts_until_the_next() -> None:
    clock = Counted(0, 1, 3, 7)
    for label in ("forward", "backward", "forward", "update"):
        clock.mark(label)
    assert clock.laps_ms("forward") == [1, 4]
    assert clock.laps_ms("backward") == [2]
    assert clock.laps_ms("update") == []  # not over yet
    assert clock.laps_ms("never") == []


def test_what_follows_a_lap_belongs_to_nothing() -> None:
    clock = Counted(0, 1, 10, 12)
    for _ in range(2):
        with clock.lap("step"):
            pass
    assert clock.laps_ms("step") == [1, 2]


def test_a_clock_without_marks_has_no_laps() -> None:
    assert HostClock().laps_ms("step") == []


def test_the_host_clock_counts_milliseconds() -> None:
    clock = clock_for(CPU)
    assert isinstance(clock, HostClock)
    before = time.perf_counter_ns()
    with clock.lap("nap"):
        time.sleep(0.002)
    assert 2 <= clock.laps_ms("nap")[0] <= (time.perf_counter_ns() - before) / 1e6
    synchronise(CPU)


@pytest.mark.gpu
@needs_gpu[1]
def test_the_cuda_clock_counts_what_the_device_does() -> None:
    device = torch.device("cuda")
    clock = clock_for(device)
    assert isinstance(clock, CudaClock)
    x = torch.randn(4096, 4096, device=device)
    with clock.lap("products"):
        for _ in range(10):
            torch.mm(x, x)
    assert clock.laps_ms("products")[0] > 0.1
    synchronise(device)
