"""What is measured after everything else, because measuring it disturbs: the phases of a step, and memory by kind.

The ledger is the very last: it is a dispatch mode, and nothing may run at full speed after it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any, final

import torch
from torch import Tensor

from lowvram.core.ledger import ledger
from lowvram.core.ranks import agree
from lowvram.core.rig import Part, Rig, Stepper, Update
from lowvram.core.step import step
from lowvram.data.loader import Waited
from lowvram.modes.clock import BETWEEN, Clock, clock_for
from lowvram.modes.compiling import NO_KINDS, is_compiled
from lowvram.modes.fields import Fields, status_bytes
from lowvram.modes.session import Session

PHASE_STEPS, PHASE_SECONDS = 3, 2.0  # whichever comes first, but at least one step


def last_acts(session: Session, batches: Waited) -> Fields:
    """Phases of the step, then memory. The run's own peaks are read before anything is added to them."""
    before, batch = headline(session), next(batches)
    batches.close()
    phases = phase_times(session.rig, batch)
    memory = memory_of_compiled if is_compiled(session) else memory_by_kind
    return {"time": phases, "memory": {**before, **memory(session, batch, before)}}


def headline(session: Session) -> dict[str, Any]:
    """The peaks of the whole run, never reset."""
    host = status_bytes("VmHWM")
    process = {"process_peak_bytes": max(0, host - session.resident_bytes), "host_peak_bytes": host}
    if session.rig.device.type != "cuda":
        return process
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return process | {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "source": "cuda_allocator",
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
        "alloc_retries": stats["num_alloc_retries"],
    }


def memory_by_kind(session: Session, batch: Part, before: dict[str, Any]) -> dict[str, Any]:
    """One more step under the ledger. On the CPU its peak is the headline."""
    rig = session.rig
    if rig.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ledger(rig.model, rig.stepper, batch.tensors(), rig.device) as peak:
        step(rig, batch)
    fields: dict[str, Any] = {"by_kind": named(peak.by_kind), "by_kind_max": named(peak.by_kind_max)}
    if rig.device.type == "cuda":
        return {**fields, "steady_peak_bytes": torch.cuda.max_memory_allocated()}
    return {**fields, "peak_bytes": peak.peak_bytes, "source": "tensor_ledger"}


def memory_of_compiled(session: Session, batch: Part, before: dict[str, Any]) -> dict[str, Any]:
    """Without the ledger. On the CPU the growth of the process, with all that the compiler took, is the headline."""
    unknown = {"by_kind_reason": NO_KINDS}
    if session.rig.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(session.rig, batch)
        return {**unknown, "steady_peak_bytes": torch.cuda.max_memory_allocated()}
    return {**unknown, "peak_bytes": before["process_peak_bytes"], "source": "process"}


def named(by_kind: dict[Any, int]) -> dict[str, int]:
    return {kind.value: num_bytes for kind, num_bytes in by_kind.items()}


def phase_times(rig: Rig, batch: Part) -> dict[str, float]:
    """Median milliseconds of forward, backward and update in a few extra steps."""
    sums: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
    end = time.monotonic() + PHASE_SECONDS
    while len(sums["update"]) < PHASE_STEPS and not agree(bool(sums["update"]) and time.monotonic() > end):
        clock = clock_for(rig.device)
        step(timed(rig, clock), batch)
        clock.mark(BETWEEN)
        for phase, values in sums.items():
            values.append(sum(clock.laps_ms(phase)))
    return {f"{phase}_ms": median(values) for phase, values in sums.items()}


def timed(rig: Rig, clock: Clock) -> Rig:
    """The same rig, marking its phases: a value like any other."""

    def forward(part: Part) -> Any:
        clock.mark("forward")
        return rig.forward(part)

    return replace(rig, forward=forward, stepper=TimedStepper(rig.stepper, clock))


@final
class TimedStepper(Stepper):
    """Marks when the inner stepper goes backward and when it updates."""

    def __init__(self, inner: Stepper, clock: Clock) -> None:
        self.inner, self.clock = inner, clock

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.inner.begin(num_parts, divisor)

    def backward(self, loss: Tensor) -> None:
        with self.clock.lap("backward"):
            self.inner.backward(loss)

    def update(self) -> Update:
        with self.clock.lap("update"):
            return self.inner.update()

    def set_lr(self, lr: float) -> None:
        self.inner.set_lr(lr)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
