"""Measures after the run what would disturb it: the phases of a step, traffic to the host, and memory by kind.

The ledger comes last, because it is a dispatch mode: once one was active, compiled code would run eagerly.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from lowvram.core import host
from lowvram.core.heaviest import fix_heaviest
from lowvram.core.kind import Kind
from lowvram.core.knob import is_compiled
from lowvram.core.ledger import ledger
from lowvram.core.mesh import all_ranks
from lowvram.core.peak import Peak
from lowvram.core.phases import BETWEEN, with_phases
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.core.timeline import Timeline
from lowvram.data.loader import TimedBatches
from lowvram.loops.fields import Fields, status_bytes
from lowvram.loops.profiling.clock import clock_for
from lowvram.loops.profiling.compile_time import NO_KINDS
from lowvram.loops.profiling.malloc import MallocWatch
from lowvram.loops.profiling.tensor_report import LargestTensors, NoReport, TensorReport
from lowvram.loops.session import Session
from lowvram.results import memory_over_step

PHASE_STEPS, PHASE_SECONDS = 3, 2.0  # whichever comes first, but at least one step
NO_ROOM = "the run fitted, but the extra steps that tell it ran out of memory"


def post_run(session: Session, batches: TimedBatches, peaks: dict[str, Any] | None = None) -> Fields:
    """The row's fields from extra steps: the phases of a step, then the memory of a step on the largest batch so far.
    The peaks of the run itself are read first, so that they don't include these steps. If a card's memory is too small
    for these steps, as it may be where it just held the run, the fields that they haven't told yet are missing.

    Args:
        peaks: of the run itself, if something was done since then that is no part of it; None: they are read now.
    """
    before, batch = peaks or run_peaks(session), next(batches)
    batches.close()
    found: Fields = {"memory": {**before, "by_kind_reason": NO_ROOM}}
    try:
        traffic_before = host.traffic.so_far()
        found["time"], num_steps = phase_times(session.rig, batch)
        found["traffic"] = per_step(traffic_before, host.traffic.so_far(), num_steps)
        largest = session.largest(batches, batch)
        memory = memory_of_compiled if is_compiled(session.knobs.values()) else memory_by_kind
        found["memory"] = {**before, **memory(session, largest, before)}
    except torch.OutOfMemoryError:
        if all_ranks().size > 1:  # the other ranks wait for this one
            raise
        print(f"memory by kind is unknown: {NO_ROOM}")
    return found


def run_peaks(session: Session) -> dict[str, Any]:
    """The peaks of the run so far, in bytes."""
    resident = status_bytes("VmHWM")
    process = {"process_peak_bytes": max(0, resident - session.resident_bytes), "host_peak_bytes": resident}
    if session.rig.device.type != "cuda":
        return process
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return process | {
        "peak_bytes": allocated,
        "source": "cuda_allocator",
        "reserved_bytes": reserved,
        "fragmentation_bytes": reserved - allocated,
        "inactive_split_bytes": stats["inactive_split_bytes.all.peak"],
        "device_bytes": total - free,
        "alloc_retries": stats["num_alloc_retries"],
    }


def per_step(before: dict[str, float], after: dict[str, float], num_steps: int) -> dict[str, float]:
    """Bytes copied between host and device per step, and how long the device waited for them; empty without copies."""
    moved = {name: (after[name] - before[name]) / num_steps for name in after}
    return moved if moved["to_host_bytes"] or moved["to_device_bytes"] else {}


def memory_by_kind(session: Session, batch: Part, before: dict[str, Any]) -> dict[str, Any]:
    """Run one more step under the ledger: memory by kind. On the CPU the ledger's peak is the row's `peak_bytes`. Where
    other parameters train in other steps, it is one of those that take the most memory."""
    rig = session.rig
    fix_heaviest(rig, batch)
    if rig.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    report, malloc = report_for(session), MallocWatch()
    counted = ledger(rig.model, rig.stepper, batch.tensors(), rig.device, report.origin_of, rig.teacher)
    with report, counted as peak, malloc:
        timeline = Timeline(peak)
        step(with_phases(rig, timeline), batch)
    report.write(peak)
    send(session, timeline)
    fields: dict[str, Any] = {"by_kind": named(peak.by_kind), "by_kind_max": named(peak.by_kind_max)}
    if rig.device.type == "cuda":
        steady_bytes = torch.cuda.max_memory_allocated()
        return {**fields, "steady_peak_bytes": steady_bytes, "beyond_tensors_bytes": steady_bytes - peak.peak_bytes}
    beyond = {"beyond_tensors_bytes": beyond_tensors(session, malloc, peak)}
    return {**fields, "peak_bytes": peak.peak_bytes, "source": "tensor_ledger", **beyond}


def send(session: Session, timeline: Timeline) -> None:
    """Write the memory over the step into the run's folder, and tell it for the loggers. Only rank 0 does."""
    if all_ranks().is_first:
        kinds = [kind.value for kind in Kind]
        moments = [[event, phase, *by_kind.values()] for event, phase, by_kind in timeline.moments()]
        memory_over_step.write(session.folder, kinds, moments)
        session.events("memory_over_step", kinds=kinds, moments=moments)


def beyond_tensors(session: Session, malloc: MallocWatch, peak: Peak) -> int | None:
    """The peak of malloc's bytes in the step, without those allocated before the model was made, and without the peak
    of tensors (those that knobs keep on the host included); None if malloc's bytes aren't known."""
    if malloc.peak_bytes is None or session.malloc_bytes is None:
        return None
    return max(0, malloc.peak_bytes - session.malloc_bytes - peak.peak_bytes - peak.by_kind_max[Kind.HOST])


def report_for(session: Session) -> TensorReport:
    """The report of the largest tensors if `measure.largest_tensors` is set. Only rank 0 writes one."""
    is_wanted = session.settings.measure.largest_tensors and all_ranks().is_first
    return LargestTensors(session.rig.model, session.rig.device, session.folder) if is_wanted else NoReport()


def memory_of_compiled(session: Session, batch: Part, before: dict[str, Any]) -> dict[str, Any]:
    """Memory without the ledger. On the CPU `peak_bytes` is the growth of the process, compiler included."""
    unknown = {"by_kind_reason": NO_KINDS}
    if session.settings.measure.largest_tensors:
        print(f"the largest tensors are unknown: {NO_KINDS}")
    if session.rig.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for fix in session.rig.heaviest:
            fix()
            step(session.rig, batch)
        step(session.rig, batch)
        return {**unknown, "steady_peak_bytes": torch.cuda.max_memory_allocated()}
    return {**unknown, "peak_bytes": before["process_peak_bytes"], "source": "process"}


def named(by_kind: dict[Any, int]) -> dict[str, int]:
    return {kind.value: num_bytes for kind, num_bytes in by_kind.items()}


def phase_times(rig: Rig, batch: Part) -> tuple[dict[str, float], int]:
    """Run a few extra steps; returns median milliseconds of forward, backward and update, and the number of steps."""
    labels = {"forward": ("forward",), "backward": ("backward", "weights"), "update": ("update",)}
    sums: dict[str, list[float]] = {phase: [] for phase in labels}
    end = time.monotonic() + PHASE_SECONDS
    while len(sums["update"]) < PHASE_STEPS and not all_ranks().any(bool(sums["update"]) and time.monotonic() > end):
        clock = clock_for(rig.device)
        step(with_phases(rig, clock), batch)
        clock.mark(BETWEEN)
        for phase, values in sums.items():
            values.append(sum(sum(clock.laps_ms(label)) for label in labels[phase]))
    return {f"{phase}_ms": median(values) for phase, values in sums.items()}, len(sums["update"])
