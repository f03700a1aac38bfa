"""Estimates from a trace the memory that a point needs on a device, by kind and phase, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from lowvram.core.device import Card
from lowvram.core.knob import Kind
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
from lowvram.planning.time.op_cost import FORMATS, Column
from lowvram.planning.time.roofline import DataSheet, Rates, step_time
from lowvram.planning.trace.events import Phase, Trace

NUM_LARGEST = 10  # tensors that a plan names
TOLERANCE = 1 / 256  # of the least memory: far below the error of plans, and it saves most trials
TENSORS_ERROR = 0.01  # of tensors on a CPU: tests hold plans to the ledger within it
FURTHER_STEPS = 3  # after those that are traced, in which a plan must fit
Fields = dict[str, Any]


@final
@dataclass(frozen=True)
class PlanDevice:
    """The device that a plan is for."""

    name: str
    device: DeviceSpec
    num_ranks: int = 1
    here: torch.device | None = None  # torch's device, if it is one of this machine
    rates: Rates | None = None  # measured ones; None: those of its data sheet
    host_bytes: int | None = None  # free memory of its host; None: not known

    @property
    def target(self) -> Target:
        capability = self.device.capability
        card = None if capability is None else Card(self.name, capability, self.device.multiprocessors)
        return Target(card, self.num_ranks)


def needs(trace: Trace, place: PlanDevice, is_expandable: bool, is_recurrent: bool = False) -> Fields:
    """The fields of a plan that depend on no budget. For a CPU they describe a step after the first, as the ledger
    measures it; for a card the whole run, as its allocator does.

    Args:
        is_recurrent: whether the model has layers such as an LSTM.
    """
    device = place.device
    sums = trace.sums(is_steady=not device.is_cuda)
    overheads = process_overheads(device, torch.__version__, place.num_ranks, len(trace.products))
    if is_recurrent:
        overheads.append(RECURRENT if device.is_cuda else RECURRENT_ON_CPU)
    if not device.is_cuda:
        about = num_convolutions(trace), has_narrow_products(trace)
        overheads = [*onednn_overheads(*about, torch.__version__), *overheads]
    largest = trace.largest(NUM_LARGEST, is_steady=not device.is_cuda)
    return {
        **(on_card(trace, overheads, is_expandable, sums.peak_bytes) if device.is_cuda else on_cpu(trace, overheads)),
        "host_bytes": sums.host_bytes or None,
        "by_kind": named(sums.by_kind),
        "by_kind_max": named(sums.by_kind_max),
        "by_phase": named(sums.by_phase),
        "largest": [{"name": item.maker, "kind": item.kind.value, "bytes": item.num_bytes} for item in largest],
        "lines": [{"name": item.name, "bytes": item.num_bytes, "source": item.source} for item in overheads],
        **times(trace, place),
    }


def times(trace: Trace, place: PlanDevice) -> Fields:
    """The time of a step; None if a rate isn't known, and for several ranks, as the rate between ranks isn't known."""
    rates = place.rates or DataSheet(place.device)
    time = step_time(trace.work, rates) if place.num_ranks == 1 else None
    if time is None:
        return {"step_ms": None, "step_ms_source": None, "step_ms_of": None}
    return {"step_ms": time.step_ms, "step_ms_source": rates.source, "step_ms_of": time.by_name()}


def on_cpu(trace: Trace, overheads: list[Overhead]) -> Fields:
    """Memory on a CPU: the process holds the peak of all tensors over the whole run, host memory too, and overheads."""
    tensors = trace.sums().with_host_bytes
    margins = [item.margin_bytes for item in overheads if item.is_capped]
    return {
        "allocated_bytes": trace.sums(is_steady=True).peak_bytes,
        "reserved_bytes": None,
        "process_bytes": tensors + sum(item.num_bytes or 0 for item in overheads if item.is_resident),
        "least_vram_bytes": tensors + sum(item.num_bytes or 0 for item in overheads if item.is_capped),
        "margin_bytes": None if None in margins else sum(filter(None, margins), round(TENSORS_ERROR * tensors)),
    }


def has_narrow_products(trace: Trace) -> bool:
    """Whether matrices in 16 bits are multiplied."""
    is_product = trace.work[:, Column.FAMILY] == FAMILIES.index(Family.PRODUCT)
    formats = torch.tensor([FORMATS.index(name) for name in ("bf16", "fp16")])
    return bool(torch.isin(trace.work[is_product, Column.FORMAT], formats).any())


def num_convolutions(trace: Trace) -> int:
    """The number of convolutions that differ in shape or format."""
    work = trace.work[trace.work[:, Column.FAMILY] == FAMILIES.index(Family.CONVOLUTION)]
    return len(work[:, [Column.FORMAT, Column.FLOPS, Column.BYTES, Column.NEW]].unique(dim=0))


@gc_off()
def on_card(trace: Trace, overheads: list[Overhead], is_expandable: bool, peak_bytes: int) -> Fields:
    """Memory on a card, from a replay through the caching allocator. What fits must also hold for the steps after the
    two that were traced, which find memory in other pieces."""
    spaces = workspaces(overheads, trace.products)
    events = trace.requests(spaces)
    needed = needs_of(events, expandable=is_expandable, live_peak_bytes=peak_bytes, tolerance=TOLERANCE)
    steps = [*events, *further_steps(events, trace.num_requests(trace.second_step) + len(spaces), FURTHER_STEPS)]
    if replay(steps, expandable=is_expandable, limit_bytes=needed.least_limit_bytes).oom is not None:
        longer = needs_of(steps, expandable=is_expandable, live_peak_bytes=peak_bytes, tolerance=TOLERANCE)
        needed = needed._replace(least_limit_bytes=longer.least_limit_bytes)
    outside = sum(item.num_bytes or 0 for item in overheads if not item.is_in_allocator)
    return {
        "allocated_bytes": needed.free.allocated_peak_bytes,
        "reserved_bytes": needed.free.reserved_peak_bytes,
        "process_bytes": None,
        "least_vram_bytes": needed.least_limit_bytes + outside,
        "margin_bytes": None,
    }


def workspaces(overheads: list[Overhead], products: list[int]) -> list[tuple[int, int, int]]:
    """The allocations of libraries that the allocator serves and that stay, as `Trace.requests` takes them: cuBLAS's,
    when a thread first multiplies.

    Args:
        products: the events of a trace after which that is.
    """
    sizes = [item.num_bytes for item in overheads if item.is_in_allocator and item.num_bytes]
    taken = zip(products, sizes, strict=False)  # sizes may be unknown
    return sorted(((event, -1 - number, size) for number, (event, size) in enumerate(taken)), reverse=True)


def named(sizes: Mapping[Kind, int] | Mapping[Phase, int]) -> dict[str, int]:
    return {key.value: num_bytes for key, num_bytes in sizes.items()}
