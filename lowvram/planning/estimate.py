"""Estimates from a trace the memory that a point needs on a device, by kind and phase, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from lowvram.core.device import Card
from lowvram.core.kind import Kind
from lowvram.core.row_shape import ALONE, RowShape
from lowvram.core.stages import Pass
from lowvram.planning.devices import DeviceSpec
from lowvram.planning.memory.overheads import (
    RECURRENT,
    RECURRENT_ON_CPU,
    Overhead,
    onednn_overheads,
    process_overheads,
)
from lowvram.planning.memory.replay import further_steps, gc_off, needs_of, replay
from lowvram.planning.target import Target
from lowvram.planning.time.op_class import FAMILIES, Family
from lowvram.planning.time.op_cost import BETWEEN_RANKS, FORMATS, STREAMS, Column, Stream
from lowvram.planning.time.pipeline_time import pipeline_time
from lowvram.planning.time.roofline import DataSheet, Rates, step_time
from lowvram.planning.trace.events import Phase, Trace

NUM_LARGEST = 10  # tensors that a plan names
TOLERANCE = 1 / 256  # of the search for the least memory, relative: far below plans' error, and saves most trials
TENSORS_ERROR = 0.01  # relative, of the bytes of tensors on a CPU: tests hold plans to the ledger within it
FURTHER_STEPS = 3  # after the two that are traced; the memory found must be enough for them, too
Fields = dict[str, Any]


@final
@dataclass(frozen=True)
class PlanDevice:
    """The device that a plan is for."""

    name: str
    device: DeviceSpec
    num_ranks: int = 1
    row: RowShape = ALONE
    here: torch.device | None = None  # the same as a torch device; None: it isn't one of this machine
    rates: Rates | None = None  # measured rates; None: those of its data sheet are used
    host_bytes: int | None = None  # free memory of its host; None: not known
    link_of_plan: float | None = None  # what the user says of the link; None: what its data sheet does
    zero_grad: str | None = None  # where a plain loop zeroes gradients; None: the plan is of lowvram's own loop

    @property
    def link_bytes_per_s(self) -> float | None:
        """What the link to other ranks carries one way at most; None: not known."""
        return self.link_of_plan or self.device.link_bytes_per_s

    @property
    def target(self) -> Target:
        capability = self.device.capability
        card = None if capability is None else Card(self.name, capability, self.device.multiprocessors)
        return Target(card, self.num_ranks, self.row, zero_grad=self.zero_grad)


class Pipeline(NamedTuple):
    """A point's stages."""

    traces: Sequence[Trace]  # of a rank of each
    passes: Sequence[Sequence[Pass]]  # of each of these ranks, in order


def needs(
    trace: Trace,
    plan_device: PlanDevice,
    is_expandable: bool,
    is_recurrent: bool = False,
    pipeline: Pipeline | None = None,
    vram_bytes: int | None = None,
) -> Fields:
    """The fields of a plan but for whether it fits. For a CPU they describe a step after the first, which is what the
    ledger measures; for a card the whole run, since the allocator's peak counts from its start.

    Args:
        trace: of a pipeline, that of the stage that takes the most memory.
        is_recurrent: whether the model has layers such as an LSTM.
        pipeline: all of its stages; None: there are none.
        vram_bytes: the limit `vram`; None: the device's memory.
    """
    device = plan_device.device
    sums = trace.sums(is_steady=not device.is_cuda)
    overheads = process_overheads(device, torch.__version__, plan_device.num_ranks, len(trace.first_matmuls))
    if is_recurrent:
        overheads.append(RECURRENT if device.is_cuda else RECURRENT_ON_CPU)
    if not device.is_cuda:
        about = num_convolutions(trace), has_16_bit_matmuls(trace)
        overheads = [*onednn_overheads(*about, torch.__version__), *overheads]
    largest = trace.largest(NUM_LARGEST, is_steady=not device.is_cuda)
    if device.is_cuda:
        memory = on_card(trace, overheads, is_expandable, sums.peak_bytes, vram_bytes or device.memory_bytes)
    else:
        memory = on_cpu(trace, overheads)
    return {
        **memory,
        "host_bytes": sums.host_bytes or None,
        "by_kind": named(sums.by_kind),
        "by_kind_max": named(sums.by_kind_max),
        "by_phase": named(sums.by_phase),
        "largest": [{"name": item.maker, "kind": item.kind.value, "bytes": item.num_bytes} for item in largest],
        "lines": [line_of(item) for item in overheads],
        **times(trace, plan_device, pipeline),
        **traffic(trace, plan_device),
    }


def line_of(item: Overhead) -> Fields:
    """Memory other than tensors, as the plan's `lines` have it."""
    least = {} if item.least_bytes is None else {"least_bytes": item.least_bytes}
    return {"name": item.name, "bytes": item.num_bytes, **least, "source": item.source}


def traffic(trace: Trace, plan_device: PlanDevice) -> Fields:
    """The fields about what a rank sends to others in a step, and how long its link is busy with it at least."""
    if plan_device.num_ranks == 1:
        return {"wire_bytes": None, "wire_bytes_of": None, "wire_ms": None}
    by_dimension = {stream.value: bytes_on(trace, stream) for stream in BETWEEN_RANKS}
    num_bytes, rate = sum(by_dimension.values()), plan_device.link_bytes_per_s
    return {
        "wire_bytes": num_bytes,
        "wire_bytes_of": {name: each for name, each in by_dimension.items() if each},
        "wire_ms": None if rate is None else 1e3 * num_bytes / rate,
    }


def bytes_on(trace: Trace, stream: Stream) -> int:
    """The bytes of a step that a stream moves."""
    there = trace.work[trace.work[:, Column.STREAM] == STREAMS.index(stream)]
    return int((there[:, Column.BYTES] * there[:, Column.TIMES]).sum())


def times(trace: Trace, plan_device: PlanDevice, pipeline: Pipeline | None = None) -> Fields:
    """The fields about the time of a step. They are None if a rate isn't known."""
    rates, link = plan_device.rates or DataSheet(plan_device.device), plan_device.link_bytes_per_s
    if pipeline is None:
        time = step_time(trace.work, rates, link)
    else:
        time = pipeline_time([each.work for each in pipeline.traces], pipeline.passes, rates, link)
    if time is None:
        return dict.fromkeys(("step_ms", "step_ms_source", "step_ms_of", "beside_ms_of"))
    beside_ms = {name: each for name, each in time.beside_ms.items() if each}
    return {
        "step_ms": time.step_ms,
        "step_ms_source": rates.source,
        "step_ms_of": time.by_name(),
        "beside_ms_of": beside_ms or None,
    }


def on_cpu(trace: Trace, overheads: list[Overhead]) -> Fields:
    """The fields about memory on a CPU. A process needs the peak of all tensors over the whole run, those that knobs
    keep on the host included, and the overheads."""
    tensors = trace.sums().with_host_bytes
    margins = [item.margin_bytes for item in overheads if item.is_capped]
    return {
        "allocated_bytes": trace.sums(is_steady=True).peak_bytes,
        "reserved_bytes": None,
        "process_bytes": tensors + sum(item.num_bytes or 0 for item in overheads if item.is_resident),
        "least_vram_bytes": tensors + sum(item.num_bytes or 0 for item in overheads if item.is_capped),
        "margin_bytes": None if None in margins else sum(filter(None, margins), round(TENSORS_ERROR * tensors)),
    }


def has_16_bit_matmuls(trace: Trace) -> bool:
    """Whether the step multiplies matrices in bf16 or fp16."""
    is_product = trace.work[:, Column.FAMILY] == FAMILIES.index(Family.PRODUCT)
    formats = torch.tensor([FORMATS.index(name) for name in ("bf16", "fp16")])
    return bool(torch.isin(trace.work[is_product, Column.FORMAT], formats).any())


def num_convolutions(trace: Trace) -> int:
    """The number of convolutions that differ in work or format, and so in shape."""
    work = trace.work[trace.work[:, Column.FAMILY] == FAMILIES.index(Family.CONVOLUTION)]
    return len(work[:, [Column.FORMAT, Column.FLOPS, Column.BYTES, Column.NEW]].unique(dim=0))


@gc_off()
def on_card(
    trace: Trace, overheads: list[Overhead], is_expandable: bool, peak_bytes: int, budget_bytes: int | None
) -> Fields:
    """The fields about memory on a card, from a replay through the simulated caching allocator. The least limit must
    also be enough for the steps after the two traced ones, in which the allocator's memory is fragmented differently.
    Where the budget allows no more, the allocator gives free segments back, and reserves less.
    """
    spaces = workspaces(overheads, trace.first_matmuls)
    events = trace.requests(spaces)
    needed = needs_of(events, expandable=is_expandable, live_peak_bytes=peak_bytes, tolerance=TOLERANCE)
    steps = [*events, *further_steps(events, trace.num_requests(trace.second_step) + len(spaces), FURTHER_STEPS)]
    if replay(steps, expandable=is_expandable, limit_bytes=needed.least_limit_bytes).oom is not None:
        longer = needs_of(steps, expandable=is_expandable, live_peak_bytes=peak_bytes, tolerance=TOLERANCE)
        needed = needed._replace(least_limit_bytes=longer.least_limit_bytes)
    outside = sum(item.num_bytes or 0 for item in overheads if not item.is_in_allocator)
    free, limit_bytes = needed.free, None if budget_bytes is None else budget_bytes - outside
    if limit_bytes is not None and needed.least_limit_bytes <= limit_bytes < free.reserved_peak_bytes:
        limited = replay(events, expandable=is_expandable, limit_bytes=limit_bytes)
        free = free if limited.oom is not None else limited
    return {
        "allocated_bytes": free.allocated_peak_bytes,
        "reserved_bytes": free.reserved_peak_bytes,
        "process_bytes": None,
        "least_vram_bytes": needed.least_limit_bytes + outside,
        "margin_bytes": None,
    }


def workspaces(overheads: list[Overhead], first_matmuls: list[int]) -> list[tuple[int, int, int]]:
    """The workspaces that libraries get from the allocator and keep, as `Trace.requests` takes them. cuBLAS gets one in
    each thread, with the thread's first matrix product.

    Args:
        first_matmuls: as of a `Trace`.
    """
    sizes = [item.num_bytes for item in overheads if item.is_in_allocator and item.num_bytes]
    taken = zip(first_matmuls, sizes, strict=False)  # sizes may be unknown
    return sorted(((event, -1 - number, size) for number, (event, size) in enumerate(taken)), reverse=True)


def named(sizes: Mapping[Kind, int] | Mapping[Phase, int]) -> dict[str, int]:
    return {key.value: num_bytes for key, num_bytes in sizes.items()}
