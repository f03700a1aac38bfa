"""What a trace means on a device: the memory that it needs there, by kind and phase, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from lowvram.core.device import Card
from lowvram.core.knob import Kind
from lowvram.planning.devices import DeviceSpec
from lowvram.planning.memory.overheads import Overhead, convolution_lines, hidden_lines
from lowvram.planning.memory.replay import Event, garbage_later, needs_of
from lowvram.planning.target import Target
from lowvram.planning.time.op_class import FAMILIES, Family
from lowvram.planning.time.op_cost import Column
from lowvram.planning.time.roofline import DataSheet, Rates, step_time
from lowvram.planning.trace.events import Phase, Trace

NUM_LARGEST = 10  # tensors that a plan names
TOLERANCE = 1 / 256  # of the least memory: a small part of what plans err by, and it saves most trials
Fields = dict[str, Any]


@final
@dataclass(frozen=True)
class PlanDevice:
    """The device that a plan is for."""

    name: str
    device: DeviceSpec
    num_ranks: int = 1
    here: torch.device | None = None  # the same as torch calls it, where it is one of this machine
    rates: Rates | None = None  # None: those of its data sheet
    host_bytes: int | None = None  # free memory of its host; None: not known

    @property
    def target(self) -> Target:
        card = None if self.device.capability is None else Card(self.name, self.device.capability)
        return Target(card, self.num_ranks)


def needs(trace: Trace, place: PlanDevice, is_expandable: bool) -> Fields:
    """The part of a plan that depends on no budget. On a CPU it is that of a step whose optimizer has its state, as the
    ledger measures it; on a card that of the whole run, as its allocator does."""
    device = place.device
    sums = trace.sums(is_steady=not device.is_cuda)
    lines = hidden_lines(device, torch.__version__, place.num_ranks)
    lines = lines if device.is_cuda else [*convolution_lines(num_convolutions(trace), torch.__version__), *lines]
    largest = trace.largest(NUM_LARGEST, is_steady=not device.is_cuda)
    return {
        **(on_card(trace, lines, is_expandable, sums.peak_bytes) if device.is_cuda else on_cpu(trace, lines)),
        "host_bytes": sums.host_bytes or None,
        "by_kind": named(sums.by_kind),
        "by_kind_max": named(sums.by_kind_max),
        "by_phase": named(sums.by_phase),
        "largest": [{"name": one.maker, "kind": one.kind.value, "bytes": one.num_bytes} for one in largest],
        "lines": [{"name": line.name, "bytes": line.num_bytes, "source": line.source} for line in lines],
        **times(trace, place),
    }


def times(trace: Trace, place: PlanDevice) -> Fields:
    """Null where the device's rates are not known, and for several ranks: nothing is known of the way between them."""
    rates = place.rates or DataSheet(place.device)
    found = step_time(trace.work, rates) if place.num_ranks == 1 else None
    if found is None:
        return {"step_ms": None, "step_ms_source": None, "step_ms_of": None}
    return {"step_ms": found.step_ms, "step_ms_source": rates.source, "step_ms_of": found.by_name()}


def on_cpu(trace: Trace, lines: list[Overhead]) -> Fields:
    """A CPU is its own host, and its process holds what tensors hold at any time in the whole run, and more."""
    tensors = trace.sums().with_host_bytes
    return {
        "allocated_bytes": trace.sums(is_steady=True).peak_bytes,
        "reserved_bytes": None,
        "process_bytes": tensors + sum(line.num_bytes or 0 for line in lines if line.is_resident),
        "least_vram_bytes": tensors + sum(line.num_bytes or 0 for line in lines if line.is_capped),
    }


def num_convolutions(trace: Trace) -> int:
    """That differ in shape or format."""
    work = trace.work[trace.work[:, Column.FAMILY] == FAMILIES.index(Family.CONVOLUTION)]
    return len(work[:, [Column.FORMAT, Column.FLOPS, Column.BYTES, Column.NEW]].unique(dim=0))


@garbage_later()
def on_card(trace: Trace, lines: list[Overhead], is_expandable: bool, peak_bytes: int) -> Fields:
    """As the caching allocator plays it."""
    events = [*workspaces(lines), *trace.requests()]
    found = needs_of(events, expandable=is_expandable, live_peak_bytes=peak_bytes, tolerance=TOLERANCE)
    outside = sum(line.num_bytes or 0 for line in lines if not line.is_in_allocator)
    return {
        "allocated_bytes": found.free.allocated_peak_bytes,
        "reserved_bytes": found.free.reserved_peak_bytes,
        "process_bytes": None,
        "least_vram_bytes": found.least_limit_bytes + outside,
    }


def workspaces(lines: list[Overhead]) -> list[Event]:
    """What libraries take from the allocator and keep."""
    sizes = [line.num_bytes for line in lines if line.is_in_allocator and line.num_bytes]
    return [Event(-1 - number, size) for number, size in enumerate(sizes)]


def named(sizes: Mapping[Kind, int] | Mapping[Phase, int]) -> dict[str, int]:
    return {key.value: num_bytes for key, num_bytes in sizes.items()}
