"""How long a step would take on a device: the roofline of each of its operators, and what the host adds.

Williams et al., "Roofline" (2009): an operator takes as long as its arithmetic at the device's peak rate, or as moving
what it reads and writes, whichever is longer; neither peak is ever reached. Copies to the host and back, and what the
host's processor computes, go on beside that: each phase of each part of the batch takes as long as the slowest of them.

Rates come from a data sheet, with efficiencies that are assumed: they rank points, and a prediction may be wrong by as
much as they are. Or they are measured on the device that is here (lowvram/planning/time/calibration.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.planning.devices import DeviceSpec
from lowvram.planning.time.op_cost import FORMATS, STREAMS, Column, Stream
from lowvram.planning.trace.events import PHASES

SOURCE = "assumed efficiencies"  # of all constants below
PRODUCT_EFFICIENCY = 0.6  # of the peak rate: large GEMMs reach 60 to 80 %
BANDWIDTH_EFFICIENCY = 0.8  # of memory: what a large copy reaches
PCIE_EFFICIENCY = 0.8  # of pinned copies
LAUNCH_S = 4e-6  # of a kernel: between its call and its first work, and at its end
HOST_BYTES_PER_S = 25e9  # about half the peak of two channels of DDR4-3200


@final
@dataclass(frozen=True)
class StepTime:
    """A step's time and what it is made of, in ms."""

    products_ms: float  # operators that arithmetic bounds
    memory_ms: float  # operators that the device's memory bounds, and to get memory
    launches_ms: float
    copies_ms: float  # that the device waits for
    host_ms: float  # that the device waits for the host's processor, such as its updates

    @property
    def step_ms(self) -> float:
        return sum(vars(self).values())

    def by_name(self) -> dict[str, float]:
        """What it is made of."""
        return {name.removesuffix("_ms"): milliseconds for name, milliseconds in vars(self).items()}


class Extra(NamedTuple):
    """What operators take beside their work, and what goes on beside them."""

    launch_s: float = 0.0  # the device, on each operator
    dispatch_s: float = 0.0  # the host, on each operator, while the device does what it was told before
    is_own_host: bool = False  # copies, and what the host computes, take the device's own time


class Rates(ABC):
    """How fast a device is at each operator."""

    source: str  # where the rates are from
    extra: Extra

    @abstractmethod
    def taken_s(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """(operators,) each: the time for the arithmetic of `Trace.work`, and for the bytes, each line run once; NaN
        where a rate is not known."""

    def getting_s(self, work: Tensor) -> Tensor:
        """(operators,) the time to get the memory of what they make: none where an allocator keeps what was freed."""
        return torch.zeros(len(work), dtype=torch.float64)


@final
class DataSheet(Rates):
    """The peaks that a device is sold with, and assumed shares of them."""

    source = SOURCE

    def __init__(self, device: DeviceSpec) -> None:
        self.extra = Extra(launch_s=LAUNCH_S)
        peaks = device.peak_flops_per_s
        self.product_rates = PRODUCT_EFFICIENCY * known([peaks.get(name) for name in FORMATS])
        pcie = None if device.pcie_bytes_per_s is None else PCIE_EFFICIENCY * device.pcie_bytes_per_s
        memory = None if device.bandwidth_bytes_per_s is None else BANDWIDTH_EFFICIENCY * device.bandwidth_bytes_per_s
        rates = {Stream.DEVICE: memory, Stream.HOST: HOST_BYTES_PER_S}
        self.bandwidths = known([rates.get(stream, pcie) for stream in STREAMS])

    def taken_s(self, work: Tensor) -> tuple[Tensor, Tensor]:
        flops = work[:, Column.FLOPS]
        arithmetic_s = (flops / self.product_rates[work[:, Column.FORMAT]]).where(flops > 0, 0.0)
        return arithmetic_s, work[:, Column.BYTES] / self.bandwidths[work[:, Column.STREAM]]


def step_time(work: Tensor, rates: Rates) -> StepTime | None:
    """Of `Trace.work` on one device; None where a rate that it needs is not known."""
    stream, times, extra = work[:, Column.STREAM], work[:, Column.TIMES], rates.extra
    is_device = stream == STREAMS.index(Stream.DEVICE)
    arithmetic_s, moving_s = rates.taken_s(work)
    if (arithmetic_s.isnan() | moving_s.isnan()).any():
        return None
    is_product, getting_s = arithmetic_s > moving_s, rates.getting_s(work) * times
    working_s = torch.maximum(arithmetic_s, moving_s) * times
    taken_s = working_s + getting_s
    waiting_s = excess_s(work, taken_s + extra.launch_s * times * is_device, extra.is_own_host)
    num_launches, busy_s = int(times[is_device].sum()), float(taken_s[is_device].sum())
    return StepTime(
        1e3 * float(working_s[is_device & is_product].sum()),
        1e3 * float(working_s[is_device & ~is_product].sum() + getting_s[is_device].sum()),
        1e3 * (extra.launch_s * num_launches + max(0.0, extra.dispatch_s * num_launches - busy_s)),
        1e3 * waiting_s[Stream.TO_HOST],
        1e3 * waiting_s[Stream.HOST],
    )


def known(rates: list[float | None]) -> Tensor:
    return torch.tensor([float("nan") if rate is None else rate for rate in rates], dtype=torch.float64)


def excess_s(work: Tensor, taken_s: Tensor, is_own_host: bool) -> dict[Stream, float]:
    """How long the device waits for what goes on beside it, over all phases of all parts: for the host, or for copies
    in either direction (under `Stream.TO_HOST`). A device that is its own host does all of it itself."""
    place = work[:, Column.PART] * len(PHASES) + work[:, Column.PHASE]
    num_places = int(place.max()) + 1 if len(place) else 0
    by_lane = torch.zeros(len(STREAMS), num_places, dtype=torch.float64)
    by_lane.view(-1).scatter_add_(0, work[:, Column.STREAM] * num_places + place, taken_s)
    busy = dict(zip(STREAMS, by_lane, strict=True))
    if is_own_host:
        copies_s = busy[Stream.TO_HOST].sum() + busy[Stream.TO_DEVICE].sum()
        return {Stream.HOST: float(busy[Stream.HOST].sum()), Stream.TO_HOST: float(copies_s)}
    copies = torch.maximum(busy[Stream.TO_HOST], busy[Stream.TO_DEVICE])
    missing = (torch.maximum(copies, busy[Stream.HOST]) - busy[Stream.DEVICE]).clamp(min=0)
    is_host = busy[Stream.HOST] > copies
    return {Stream.HOST: float(missing[is_host].sum()), Stream.TO_HOST: float(missing[~is_host].sum())}
