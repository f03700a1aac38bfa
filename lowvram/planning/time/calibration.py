"""The rates that microbench.py has measured on a device of this machine, and the files that keep them.

A rate isn't constant: small operators don't fill a device, large ones don't fit its caches. So each family of operators
has, in each number format, a curve of rates over the size of an operator's work: linear on logarithmic axes between the
measured sizes, constant beyond them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lowvram.config.cache_folder import cache_folder
from lowvram.config.identity import device_name
from lowvram.planning.cache import write_if_possible
from lowvram.planning.time.op_class import FAMILIES, FLOP_FAMILIES, Family
from lowvram.planning.time.op_cost import FORMATS, STREAMS, Column, Stream
from lowvram.planning.time.roofline import Extra, Rates, rates_tensor
from lowvram.results.files.regular import SHORT_BYTES, read_regular

SOURCE = "calibrated on this device"
ANY_FORMAT = "fp32"  # its rate is used for formats that weren't measured, except in `FLOP_FAMILIES`
# Source files whose change makes kept rates invalid.
MEASURED_BY = ("calibration.py", "op_class.py", "microbench.py", "op_cost.py")
COPY_TOUCHES = 2  # a copy on a CPU reads each byte and writes it


class Curve(NamedTuple):
    """Rates (bytes/s or FLOP/s) by the work of one operator (bytes or FLOPs), the smallest first."""

    amounts: list[float]
    rates: list[float]

    def at(self, amounts: Tensor) -> Tensor:
        """The rates for these amounts of work: float64 of the same shape."""
        x, y = rates_tensor(list(self.amounts)).log(), rates_tensor(list(self.rates)).log()
        wanted = amounts.double().clamp(self.amounts[0], self.amounts[-1]).log()
        above = torch.searchsorted(x, wanted).clamp(1, max(len(x) - 1, 1))
        if len(x) == 1:
            return y.exp().expand_as(wanted)
        share = (wanted - x[above - 1]) / (x[above] - x[above - 1])
        return torch.lerp(y[above - 1], y[above], share).exp()


@final
class Calibration(Rates):
    """Measured rates of a device.

    Args:
        curves: by the value of a `Family`, then by a format of `FORMATS`.
        overhead_s: per operator, the time of Python, torch and autograd, including views and modules.
        copies: bytes/s by the value of a `Stream`, for copies and host work in parallel with a card; None for a CPU.
        allocation: bytes/s of getting a new tensor's memory from the operating system, by the tensor's bytes; None if
            that takes no time, as the allocator keeps freed memory.
    """

    source = SOURCE

    def __init__(
        self,
        curves: Mapping[str, Mapping[str, Curve]],
        overhead_s: float,
        copies: Mapping[str, float] | None = None,
        allocation: Curve | None = None,
    ) -> None:
        self.curves, self.overhead_s, self.copies, self.allocation = curves, overhead_s, copies, allocation
        is_own_host = copies is None
        self.extra = Extra(overhead_s, 0.0, is_own_host) if is_own_host else Extra(0.0, overhead_s, is_own_host)

    def taken_s(self, work: Tensor) -> tuple[Tensor, Tensor]:
        flops, num_bytes = work[:, Column.FLOPS].double(), work[:, Column.BYTES].double()
        arithmetic_s, moving_s = torch.zeros_like(flops), torch.zeros_like(flops)
        codes, places = work[:, [Column.STREAM, Column.FAMILY, Column.FORMAT]].unique(dim=0, return_inverse=True)
        for number, (stream, family, number_format) in enumerate(codes.tolist()):
            here = places == number
            if STREAMS[stream] is not Stream.DEVICE:
                moving_s[here] = self.parallel_s(STREAMS[stream], num_bytes[here])
                continue
            name = FORMATS[number_format]
            if FAMILIES[family] in FLOP_FAMILIES:
                arithmetic_s[here] = seconds(self.curve(FAMILIES[family], name), flops[here])
            else:
                moving_s[here] = seconds(self.curve(FAMILIES[family], name), num_bytes[here])
        return arithmetic_s, moving_s

    def allocation_s(self, work: Tensor) -> Tensor:
        new_bytes = work[:, Column.NEW].double()
        return torch.zeros_like(new_bytes) if self.allocation is None else seconds(self.allocation, new_bytes)

    def parallel_s(self, stream: Stream, num_bytes: Tensor) -> Tensor:
        """Seconds of copies between host and device, or of work on the host's processor. What a card sends to others
        takes an unknown time: no calibration knows its links."""
        if self.copies is not None:
            rate = self.copies.get(stream.value, math.nan)
            return (num_bytes / rate).where(num_bytes > 0, 0.0)
        touched = num_bytes * (1 if stream is Stream.HOST else COPY_TOUCHES)
        return seconds(self.curve(Family.MOVING, ANY_FORMAT), touched)

    def curve(self, family: Family, number_format: str) -> Curve | None:
        """The curve of this family and format. If it wasn't measured: None in `FLOP_FAMILIES`; else the family's curve
        in fp32, or that of `Family.MOVING`."""
        own = self.curves.get(family.value, {})
        if number_format in own or family in FLOP_FAMILIES:
            return own.get(number_format)
        moving = self.curves.get(Family.MOVING.value, {})
        return own.get(ANY_FORMAT) or moving.get(number_format) or moving.get(ANY_FORMAT)


def seconds(curve: Curve | None, amounts: Tensor) -> Tensor:
    """Seconds for these amounts of work; NaN without a curve."""
    return torch.full_like(amounts, float("nan")) if curve is None else amounts / curve.at(amounts)


@final
class Calibrations:
    """The calibrations of this machine, on disk: one for each device, torch, number of threads and allocator."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "calibrations"

    def known(self, device: torch.device, allocator: str = "default") -> Calibration | None:
        """The calibration on disk; None if there is none, or it can't be read."""
        key = key_of(device, allocator)
        try:
            held = json.loads(read_regular(self.path(key), SHORT_BYTES))
            is_whole = held["hash"] == hash_of(held["rates"])
            return from_plain(held["rates"]) if held["key"] == key and is_whole else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def get(self, device: torch.device, allocator: str, measure: Callable[[torch.device], Calibration]) -> Calibration:
        """The calibration on disk, or else one that is measured now, and written if possible.

        Args:
            allocator: the option of the group `allocator` that is in effect in this process: with some, each new tensor
                gets its memory from the operating system, which takes time.
        """
        calibration = self.known(device, allocator)
        if calibration is None:
            calibration, key = measure(device), key_of(device, allocator)
            rates = to_plain(calibration)
            text = json.dumps({"key": key, "hash": hash_of(rates), "rates": rates}, indent=1)
            write_if_possible(self.path(key), lambda file: file.write(text.encode()))
        return calibration

    def path(self, key: str) -> Path:
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def hash_of(rates: Any) -> str:
    """By which a calibration on disk is known to be as it was written."""
    return hashlib.blake2b(json.dumps(rates).encode(), digest_size=16).hexdigest()


def key_of(device: torch.device, allocator: str) -> str:
    """Everything that rates depend on. A card's rates don't depend on the option, as with each of them the CUDA
    allocator keeps freed memory."""
    is_card = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_card else f"cpu of {device_name()}"
    digest = hashlib.blake2b(digest_size=8)
    for source in MEASURED_BY:
        digest.update((Path(__file__).parent / source).read_bytes())
    about = f"{num_threads()} threads, {'any allocator' if is_card else f'allocator={allocator}'}"
    return f"{name}, torch {torch.__version__}, {about}, {digest.hexdigest()}"


def num_threads() -> int:
    """The threads that a point computes with: one for each core that the process may use."""
    return len(os.sched_getaffinity(0))


def to_plain(calibration: Calibration) -> dict[str, Any]:
    return {name: getattr(calibration, name) for name in ("curves", "overhead_s", "copies", "allocation")}


def from_plain(held: dict[str, Any]) -> Calibration:
    """Raises KeyError, TypeError, ValueError or AttributeError where `held` is no calibration."""
    curves = {
        Family(family).value: {name: checked(Curve(*curve)) for name, curve in by_format.items()}
        for family, by_format in held["curves"].items()
    }
    copies = None if held["copies"] is None else {stream: float(rate) for stream, rate in held["copies"].items()}
    allocation = None if held["allocation"] is None else checked(Curve(*held["allocation"]))
    return Calibration(curves, float(held["overhead_s"]), copies, allocation)


def checked(curve: Curve) -> Curve:
    is_whole = len(curve.amounts) == len(curve.rates) > 0
    if not is_whole or min(curve.amounts + curve.rates) <= 0 or sorted(set(curve.amounts)) != curve.amounts:
        raise ValueError(f"no curve: {curve}")
    return curve
