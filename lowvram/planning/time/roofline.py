"""Predicts how long a step takes on a device: the roofline of each operator, and the overhead of the host.

Williams et al., "Roofline" (2009): an operator takes as long as its arithmetic at the device's peak rate, or as moving
what it reads and writes, whichever is longer; neither peak is ever reached. Copies to the host and back, and work on
the host's processor, run in parallel: each phase of each part of the batch takes as long as the slowest of these.

Of messages to other ranks those of weights and gradients run in parallel, too; the outputs of split layers, and tokens
that ranks exchange, hold up the computation. What goes from stage to stage of a pipeline is in pipeline_time.py.

Rates come from a data sheet, with assumed efficiencies, which are good enough to rank points; predictions are as wrong
as the efficiencies are. Or rates are measured on a device of this machine (lowvram/planning/time/calibration.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.planning.devices import DeviceSpec
from lowvram.planning.time.op_cost import BETWEEN_RANKS, FORMATS, STREAMS, Column, Stream
from lowvram.planning.trace.events import PHASES

SOURCE = "assumed efficiencies"  # of all constants below
PRODUCT_EFFICIENCY = 0.6  # of the peak rate: large GEMMs reach 60 to 80 %
BANDWIDTH_EFFICIENCY = 0.8  # of memory: what a large copy reaches
PCIE_EFFICIENCY = 0.8  # of pinned copies
LINK_EFFICIENCY = 0.6  # of what a link carries one way: rings of NCCL
MESSAGE_S = 20e-6  # before a message's bytes
LAUNCH_S = 4e-6  # per kernel, before and after its work
DISPATCH_S = 30e-6  # of the host, per operator that it calls: that of an H200 took 32 µs (GPT-2) and 44 (ResNet-50)
HOST_BYTES_PER_S = 25e9  # about half the peak of two channels of DDR4-3200


@final
@dataclass(frozen=True)
class StepTime:
    """A step's time by cause, in ms, and how long what runs beside the device's computation takes by itself."""

    products_ms: float  # operators bound by arithmetic
    memory_ms: float  # operators bound by memory bandwidth, and allocation of memory
    launches_ms: float
    copies_ms: float  # that the device waits for
    host_ms: float  # that the device waits for work of the host's processor, such as updates there
    ranks_ms: float = 0.0  # that the device waits for messages of other ranks
    bubble_ms: float = 0.0  # that the device waits for other stages of a pipeline
    beside_ms: Mapping[str, float] = field(default_factory=dict)  # of copies and the host's work, hidden or not

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms().values())

    def parts_ms(self) -> dict[str, float]:
        return {name: each for name, each in vars(self).items() if name != "beside_ms"}

    def by_name(self) -> dict[str, float]:
        """The parts of the sum, by name; those about other ranks only where there are any."""
        of_ranks = ("ranks_ms", "bubble_ms")
        there = {name: each for name, each in self.parts_ms().items() if each or name not in of_ranks}
        return {name.removesuffix("_ms"): milliseconds for name, milliseconds in there.items()}


WAITED_FOR = (Stream.TO_HOST, Stream.HOST, Stream.BY_DATA)  # the first stands for copies in both directions


class Extra(NamedTuple):
    """The overhead of operators, and whether the host works in parallel with the device."""

    launch_s: float = 0.0  # per operator, on the device
    dispatch_s: float = 0.0  # per operator, on the host, in parallel with the device
    is_own_host: bool = False  # a CPU: copies and the host's work take the device's own time


class Rates(ABC):
    """How fast a device is at each operator."""

    source: str  # where the rates are from
    extra: Extra

    @abstractmethod
    def taken_s(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors (operators,): for each line of `Trace.work` the seconds of its arithmetic and of moving its
        bytes, if it runs once. NaN where a rate isn't known."""

    def allocation_s(self, work: Tensor) -> Tensor:
        """(operators,): seconds to get memory for the tensors that an operator makes; 0 if the allocator keeps freed
        memory."""
        return torch.zeros(len(work), dtype=torch.float64)


@final
class DataSheet(Rates):
    """The peak rates of a device's data sheet, times assumed efficiencies."""

    source = SOURCE

    def __init__(self, device: DeviceSpec) -> None:
        self.extra = Extra(launch_s=LAUNCH_S, dispatch_s=DISPATCH_S)
        peaks = device.peak_flops_per_s
        self.product_rates = PRODUCT_EFFICIENCY * rates_tensor([peaks.get(name) for name in FORMATS])
        pcie = None if device.pcie_bytes_per_s is None else PCIE_EFFICIENCY * device.pcie_bytes_per_s
        memory = None if device.bandwidth_bytes_per_s is None else BANDWIDTH_EFFICIENCY * device.bandwidth_bytes_per_s
        rates = {Stream.DEVICE: memory, Stream.HOST: HOST_BYTES_PER_S}
        self.bandwidths = rates_tensor([rates.get(stream, pcie) for stream in STREAMS])

    def taken_s(self, work: Tensor) -> tuple[Tensor, Tensor]:
        flops = work[:, Column.FLOPS]
        arithmetic_s = (flops / self.product_rates[work[:, Column.FORMAT]]).where(flops > 0, 0.0)
        return arithmetic_s, work[:, Column.BYTES] / self.bandwidths[work[:, Column.STREAM]]


def operators_s(work: Tensor, rates: Rates) -> Tensor:
    """(operators,): how long each line of `Trace.work` takes on the device; NaN where a rate isn't known."""
    arithmetic_s, moving_s = rates.taken_s(work)
    return (torch.maximum(arithmetic_s, moving_s) + rates.allocation_s(work) + rates.extra.launch_s) * work[
        :, Column.TIMES
    ]


def step_time(work: Tensor, rates: Rates, link_bytes_per_s: float | None = None) -> StepTime | None:
    """The time of `Trace.work` on one device; None if a rate that it needs isn't known. Without what a pipeline's
    stages wait for.

    Args:
        link_bytes_per_s: what the link to other ranks carries one way at most; None: not known.
    """
    stream, times, extra = work[:, Column.STREAM], work[:, Column.TIMES], rates.extra
    is_device, is_message = stream == STREAMS.index(Stream.DEVICE), is_on(work, BETWEEN_RANKS)
    arithmetic_s, moving_s = rates.taken_s(work)
    moving_s = torch.where(is_message, messages_s(work, link_bytes_per_s), moving_s)
    if (arithmetic_s.isnan() | moving_s.isnan()).any():
        return None
    is_product, allocation_s = arithmetic_s > moving_s, rates.allocation_s(work) * times
    working_s = torch.maximum(arithmetic_s, moving_s) * times
    taken_s = working_s + allocation_s
    busy = by_stream_s(work, taken_s + extra.launch_s * times * is_device)
    waiting_s = excess_s(busy, extra.is_own_host)
    held_up_s = float(working_s[is_on(work, [Stream.BY_CONTEXT, Stream.BY_TENSOR])].sum())
    num_launches, busy_s = int(times[is_device].sum()), float(taken_s[is_device].sum())
    calling_s = extra.dispatch_s * int((times * work[:, Column.CALLS])[is_device].sum())
    return StepTime(
        1e3 * float(working_s[is_device & is_product].sum()),
        1e3 * float(working_s[is_device & ~is_product].sum() + allocation_s[is_device].sum()),
        1e3 * (extra.launch_s * num_launches + max(0.0, calling_s - busy_s)),
        1e3 * waiting_s[Stream.TO_HOST],
        1e3 * waiting_s[Stream.HOST],
        1e3 * (held_up_s + waiting_s[Stream.BY_DATA]),
        beside_ms={} if extra.is_own_host else beside_ms(busy),
    )


def is_on(work: Tensor, streams: Sequence[Stream]) -> Tensor:
    """(operators,): whether one of these streams runs a line of `Trace.work`."""
    return torch.isin(work[:, Column.STREAM], torch.tensor([STREAMS.index(stream) for stream in streams]))


def messages_s(work: Tensor, link_bytes_per_s: float | None) -> Tensor:
    """(operators,): seconds of each line of `Trace.work`, if it is a message to other ranks. NaN where it has bytes and
    the link isn't known."""
    num_bytes = work[:, Column.BYTES].double()
    rate = math.nan if link_bytes_per_s is None else LINK_EFFICIENCY * link_bytes_per_s
    return (num_bytes / rate + MESSAGE_S).where(num_bytes > 0, 0.0)


def rates_tensor(rates: list[float | None]) -> Tensor:
    """(rates,) float64, with NaN for unknown ones."""
    return torch.tensor([float("nan") if rate is None else rate for rate in rates], dtype=torch.float64)


def by_stream_s(work: Tensor, taken_s: Tensor) -> dict[Stream, Tensor]:
    """(phases of parts,): seconds for which each stream is busy in each phase of each part."""
    place = work[:, Column.PART] * len(PHASES) + work[:, Column.PHASE]
    num_places = int(place.max()) + 1 if len(place) else 0
    by_stream = torch.zeros(len(STREAMS), num_places, dtype=torch.float64)
    by_stream.view(-1).scatter_add_(0, work[:, Column.STREAM] * num_places + place, taken_s)
    return dict(zip(STREAMS, by_stream, strict=True))


def beside_ms(busy: Mapping[Stream, Tensor]) -> dict[str, float]:
    """How long copies take, in the slower direction, and the host's work."""
    copies = torch.maximum(busy[Stream.TO_HOST], busy[Stream.TO_DEVICE])
    return {name: 1e3 * float(each.sum()) for name, each in (("copies", copies), ("host", busy[Stream.HOST]))}


def excess_s(busy: Mapping[Stream, Tensor], is_own_host: bool) -> dict[Stream, float]:
    """Seconds that the device waits for parallel work, over all phases of all parts: for the host, for copies in either
    direction (under `Stream.TO_HOST`), or for messages of weights and gradients. A CPU does all of that work itself."""
    if is_own_host:
        copies_s = busy[Stream.TO_HOST].sum() + busy[Stream.TO_DEVICE].sum()
        others = {stream: float(busy[stream].sum()) for stream in (Stream.HOST, Stream.BY_DATA)}
        return others | {Stream.TO_HOST: float(copies_s)}
    copies = torch.maximum(busy[Stream.TO_HOST], busy[Stream.TO_DEVICE])
    slowest_s, which = torch.stack([copies, *(busy[stream] for stream in WAITED_FOR[1:])]).max(dim=0)
    missing = (slowest_s - busy[Stream.DEVICE]).clamp(min=0)
    return {stream: float(missing[which == number].sum()) for number, stream in enumerate(WAITED_FOR)}
