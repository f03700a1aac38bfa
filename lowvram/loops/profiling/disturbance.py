"""Whether a measurement was disturbed: by other processes, by a lowered clock, or by something that made the times of
steps spread.

Checked only before and after the timed steps, so it slows none of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from lowvram.compat.torch_cuda import nvml_handle
from lowvram.core.mesh import all_ranks
from lowvram.loops.fields import Fields, percentiles

ALLOWED = 0.1  # relative: up to this much waiting or spread is no disturbance
# NVML's reasons for a lowered clock, without its power limit (0x04), which large matrix products reach regularly.
THROTTLES = {0x08: "the hardware", 0x20: "heat, by software", 0x40: "heat, by hardware", 0x80: "its power supply"}


class DisturbanceWatch(ABC):
    """Watches a device from the time when this object is made."""

    @abstractmethod
    def reasons(self) -> Iterator[str]:
        """What has disturbed the device since then."""


@final
class ProcessorWatch(DisturbanceWatch):
    """How long this process's threads waited for a processor while other processes ran, from Linux's schedstat. No
    reasons if the kernel doesn't keep it."""

    def __init__(self) -> None:
        self._before = self._waited_and_ran()

    def reasons(self) -> Iterator[str]:
        after = self._waited_and_ran()
        waited_ns, ran_ns = (now - then for now, then in zip(after, self._before, strict=True))
        share = waited_ns / max(1, waited_ns + ran_ns)
        if share > ALLOWED and not has_company():
            yield f"other processes had the processor for {share:.0%} of the time"

    @staticmethod
    def _waited_and_ran() -> tuple[int, int]:
        """Nanoseconds that all threads waited, and that they ran (Linux, Documentation/scheduler/sched-stats.rst)."""
        waited_ns = ran_ns = 0
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError):  # the thread has just ended, or the kernel keeps no schedstat
                ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
                waited_ns, ran_ns = waited_ns + waited, ran_ns + ran
        return waited_ns, ran_ns


@final
class CardWatch(DisturbanceWatch):
    """Other processes and lowered clocks, as NVML reports them. No reasons without the package nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._first_reasons = self._reasons_now()

    def reasons(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._first_reasons, *self._reasons_now()))

    def _reasons_now(self) -> list[str]:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            handle = nvml_handle(self._index)
        except Exception:  # the package is missing, or the driver doesn't answer
            return []
        reasons = list[str]()
        with suppress(pynvml.NVMLError):
            # Minus this process, which can't be found by its pid: NVML has pids of the host, not of a container.
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1
            reasons += [f"{others} other processes computed on the device"] if others > 0 else []
        with suppress(pynvml.NVMLError):
            mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            reasons += [f"the device's clock was lowered by {why}" for bit, why in THROTTLES.items() if mask & bit]
        return reasons


def watch_for(device: torch.device) -> DisturbanceWatch:
    return CardWatch(device) if device.type == "cuda" else ProcessorWatch()


def has_company() -> bool:
    """Whether other processes of the same point share the processors: other ranks, or a data loader's workers."""
    return all_ranks().size > 1 or bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def disturbance(watch: DisturbanceWatch, step_ms: Sequence[float], token_counts: Sequence[Tensor]) -> Fields:
    """The row's field `disturbed`, after the timed steps; empty if nothing disturbed them.

    Args:
        step_ms, token_counts: of each timed step, see `Problem.token_counts`.
    """
    reasons = [*watch.reasons(), *(spreads(step_ms) if are_alike(token_counts) else ())]
    return {"disturbed": "; ".join(reasons)} if reasons else {}


def spreads(step_ms: Sequence[float]) -> Iterator[str]:
    """A reason if the 5th or the 95th percentile of the times is too far from their median."""
    if len(step_ms) < 2:
        return
    p05_ms, p50_ms, p95_ms = percentiles(step_ms)
    spread = max(p50_ms - p05_ms, p95_ms - p50_ms) / p50_ms
    if spread > ALLOWED:
        yield f"steps took up to {spread:.0%} more or less than their median of {p50_ms:.4g} ms"


def are_alike(token_counts: Sequence[Tensor]) -> bool:
    """Whether all steps computed the same number of tokens, padding included, and so should take the same time."""
    return len({counts[1].item() for counts in token_counts}) <= 1
