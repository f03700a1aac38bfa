"""Measures time between marks. On CUDA marks are events, so marking doesn't wait for the device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import final

import torch

from lowvram.core.phases import Marks


class Clock(Marks, ABC):
    """Marks moments and returns the times between them."""

    def __init__(self) -> None:
        self._labels: list[str] = []

    def mark(self, label: str) -> None:
        """From here to the next mark the time belongs to `label`."""
        self._labels.append(label)
        self._note_moment()

    def laps_ms(self, label: str) -> list[float]:
        """The length of each interval with this label, in order. Waits for the device."""
        return [ms for name, ms in zip(self._labels, self._intervals_ms(), strict=False) if name == label]

    @abstractmethod
    def _note_moment(self) -> None: ...

    @abstractmethod
    def _intervals_ms(self) -> list[float]: ...


@final
class HostClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self._moments: list[int] = []

    def _note_moment(self) -> None:
        self._moments.append(time.perf_counter_ns())

    def _intervals_ms(self) -> list[float]:
        return [(after - before) / 1e6 for before, after in pairwise(self._moments)]


@final
class CudaClock(Clock):
    """CUDA events on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._moments: list[torch.cuda.Event] = []

    def _note_moment(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._moments.append(event)

    def _intervals_ms(self) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(self._moments)]


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
