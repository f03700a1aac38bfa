"""Measures the rates of a device of this machine, in a second or two: one operator of each family, in each format, at a
few sizes. FLOPs and bytes are counted by the same code as in a trace, so that the rates can be applied to traces.

Run it in a child, never in the fork server, which must not start threads or use CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.core.device import card_of
from lowvram.knobs.precision.fp32 import use_tf32
from lowvram.planning.devices import AMPERE
from lowvram.planning.time.calibration import Calibration, Curve, num_threads, seconds
from lowvram.planning.time.op_class import FAMILIES, FLOP_FAMILIES, Family
from lowvram.planning.time.op_cost import FORMATS, Column, OpCounter, Stream
from lowvram.planning.trace.fake import settings_restored

Run = Callable[[], Any]
FEATURES, CHANNELS, HEADS, KERNEL = 128, 32, 4, 3


@dataclass(frozen=True)
class Sample:
    """An operator that represents its family."""

    family: Family
    make: Callable[[int, torch.dtype, torch.device], Run]  # given a size, makes the call to be measured
    on_cpu: tuple[int, ...]  # log2 of the sizes to measure, the smallest first
    on_card: tuple[int, ...]


def moving(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Element-wise operators on contiguous tensors, and on strided ones, such as those of heads."""
    one, other = (torch.ones(num // FEATURES, FEATURES, dtype=dtype, device=device) for _ in range(2))
    halves = one.view(-1, 4, 2, FEATURES // 8).unbind(2)
    return lambda: (one + other, halves[0] * halves[1], torch.cat(halves, -1))


def function(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    numbers = torch.randn(num, device=device).to(dtype)
    return lambda: F.gelu(numbers, approximate="tanh")


def norm(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    """A layer norm and a batch norm."""
    rows, weight = torch.randn(num // FEATURES, FEATURES, device=device).to(dtype), torch.ones(FEATURES, device=device)
    images, weights = rows.view(-1, CHANNELS, 8, 8), (weight.to(dtype), weight[:CHANNELS].to(dtype))

    def run() -> tuple[Tensor, Tensor]:
        by_token = F.layer_norm(rows, (FEATURES,), weights[0], weights[0])
        return by_token, F.batch_norm(images, None, None, weights[1], weights[1], training=True)

    return run


def product(width: int, dtype: torch.dtype, device: torch.device) -> Run:
    """The three matrix products of a wide layer on many tokens: forward, and two as in its backward pass."""
    x = torch.randn(16 * width, width, device=device).to(dtype)
    weight = torch.randn(4 * width, width, device=device).to(dtype)
    bias = torch.zeros(4 * width, dtype=dtype, device=device)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out = F.linear(x, weight, bias)
        return out, out @ weight, out.T @ x

    return run


def convolution(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    inputs, weight = convolution_inputs(num_samples, dtype, device)
    return lambda: F.conv2d(inputs, weight, padding=1)


def convolution_backward(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    inputs, weight = (tensor.requires_grad_() for tensor in convolution_inputs(num_samples, dtype, device))
    return backward(F.conv2d(inputs, weight, padding=1), [inputs, weight])


def convolution_inputs(num_samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and weight of a convolution: with few channels on a CPU, as small models have, and many on a card."""
    channels, side = (4 * CHANNELS, 28) if device.type == "cuda" else (CHANNELS, 16)
    inputs = torch.randn(num_samples, channels, side, side, device=device).to(dtype)
    return inputs, torch.randn(channels, channels, KERNEL, KERNEL, device=device).to(dtype)


def attention(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    query, key, value = attention_inputs(num_samples, dtype, device)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_backward(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    query, key, value = (tensor.requires_grad_() for tensor in attention_inputs(num_samples, dtype, device))
    return backward(F.scaled_dot_product_attention(query, key, value, is_causal=True), [query, key, value])


def attention_inputs(num_samples: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Query, key and value, each (samples, heads, length, width)."""
    length, width = (1024, 64) if device.type == "cuda" else (128, 32)
    shape = (num_samples, HEADS, length, width)
    return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]


def backward(out: Tensor, inputs: list[Tensor]) -> Run:
    """Gradients of the same result, again and again."""
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


SAMPLES = [
    Sample(Family.MOVING, moving, (13, 17, 21), (18, 22, 25)),
    Sample(Family.FUNCTION, function, (13, 17, 20), (18, 22, 25)),
    Sample(Family.NORM, norm, (13, 17, 20), (18, 22, 25)),
    Sample(Family.PRODUCT, product, (4, 6, 7), (6, 8, 10)),
    Sample(Family.CONVOLUTION, convolution, (0, 3, 5), (2, 6)),
    Sample(Family.CONVOLUTION_BACKWARD, convolution_backward, (0, 3, 5), (2, 6)),
    Sample(Family.ATTENTION, attention, (0, 3), (2, 5)),
    Sample(Family.ATTENTION_BACKWARD, attention_backward, (0, 3), (2, 5)),
]


Stopwatch = Callable[[Run], float]  # the seconds that one call takes

NUM_ROUNDS = 3  # through all measurements; the fastest counts, as other processes slow some down
LEAST_MEASURING_S = 4e-3  # a measurement takes at least this long, and at least two calls
SLOW_S = 0.03  # if a call takes longer, larger sizes aren't tried
COPIED_BYTES = 2**25
# Around the sizes from which glibc uses mmap: 64 KiB with allocator=tight, else up to 32 MiB.
ALLOCATED_BYTES = (2**15, 3 * 2**14, 2**16, 2**20, 2**24, 2**25)
NUM_ALIVE = 4  # tensors alive at a time: glibc keeps up to 128 KiB for reuse, enough for one
LEAST_S, LEAST_SHARE = 1e-8, 0.1  # lower bounds of what remains after the time to get memory is subtracted
MOST_WAIT_S = 5e-5  # that threads wait for each other at the end of an operator


@dataclass
class Measurement:
    """A sample in one format and one size, and the time of its fastest call so far."""

    family: Family
    format: str
    amount: float  # bytes or FLOPs of an operator
    num_operators: int  # in one call
    new_bytes: Tensor  # (operators,): bytes of the tensors that each operator makes
    run: Run
    taken_s: float  # of one call


def calibrate(
    device: torch.device, samples: Sequence[Sample] | None = None, watch: Stopwatch | None = None
) -> Calibration:
    """Measure the rates of `device`; by default with `SAMPLES`, timed by `host_watch` or `card_watch`."""
    is_card = device.type == "cuda"
    watch = watch or (card_watch if is_card else host_watch)
    with settings_restored(), with_threads(num_threads()), torch.random.fork_rng([device] if is_card else []):
        measurements = [
            measurement for sample in samples or SAMPLES for measurement in measurements_of(sample, device, watch)
        ]
        overheads = [overhead_s(device)]
        for _ in range(NUM_ROUNDS - 1):
            for measurement in measurements:
                if measurement.taken_s < SLOW_S:
                    measurement.taken_s = min(measurement.taken_s, watch(measurement.run))
            overheads.append(overhead_s(device))
        copies, allocation = (copies_of(device, watch), None) if is_card else (None, measure_allocation(watch))
        return Calibration(curves_through(measurements, allocation), min(overheads), copies, allocation)


@contextmanager
def with_threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measurements_of(sample: Sample, device: torch.device, watch: Stopwatch) -> Iterator[Measurement]:
    """Measure a sample in each format, from the smallest size up to the first slow one; a format that the device can't
    run has no measurements."""
    for dtype, is_tf32 in formats_of(device, sample.family):
        for size in sample.on_card if device.type == "cuda" else sample.on_cpu:
            with suppress(RuntimeError):  # no such kernel, an unknown operator, or too little memory
                run = in_tf32(sample.make(2**size, dtype, device), is_tf32)
                amount, num_operators, name, new_bytes = counted(run, sample.family)
                measurement = Measurement(sample.family, name, amount, num_operators, new_bytes, run, watch(run))
                yield measurement
                if measurement.taken_s < SLOW_S:
                    continue
            break


def formats_of(device: torch.device, family: Family) -> list[tuple[torch.dtype, bool]]:
    """The number formats to measure, each with whether fp32 products use TF32."""
    plain = [(dtype, False) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    is_extra = device.type == "cuda" and family in FLOP_FAMILIES and card_of(device).capability >= AMPERE
    return [*plain, (torch.float32, True)] if is_extra else plain


def in_tf32(run: Run, is_tf32: bool) -> Run:
    def set_and_run() -> Any:
        use_tf32(is_tf32)
        return run()

    return set_and_run


@final
class Counting(TorchDispatchMode):
    """Counts the work of the operators that run inside, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.op_counter = OpCounter()
        self.op_counter.begin()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.op_counter.note(func, args, kwargs or {}, out)
        return out


class Counted(NamedTuple):
    """The work of one call."""

    amount: float  # bytes or FLOPs of each of the family's operators on average
    num_operators: int
    format: str
    new_bytes: Tensor  # (operators,)


def counted(run: Run, family: Family) -> Counted:
    """Count the work of one call, as traces do.

    Raises:
        RuntimeError: no operator that ran belongs to `family`, as may happen with a new version of torch.
    """
    with Counting() as counting:
        run()
    work = counting.op_counter.work()
    work = work[work[:, Column.FAMILY] == FAMILIES.index(family)]
    if not len(work):
        raise RuntimeError(f"none of the operators that ran is known as {family.value}")
    column = Column.FLOPS if family in FLOP_FAMILIES else Column.BYTES
    amount = float(work[:, column].double().mean())
    return Counted(amount, len(work), FORMATS[int(work[-1, Column.FORMAT])], work[:, Column.NEW])


def curves_through(measurements: Iterable[Measurement], allocation: Curve | None) -> dict[str, dict[str, Curve]]:
    """The curves of rates by family and format. The time to get memory for new tensors is subtracted first."""
    curves: dict[str, dict[str, Curve]] = {}
    for measurement in measurements:
        curve = curves.setdefault(measurement.family.value, {}).setdefault(measurement.format, Curve([], []))
        allocation_s = float(seconds(allocation, measurement.new_bytes.double()).sum()) if allocation else 0.0
        curve.amounts.append(measurement.amount)
        working_s = max(measurement.taken_s - allocation_s, LEAST_SHARE * measurement.taken_s)
        curve.rates.append(measurement.amount * measurement.num_operators / working_s)
    return curves


def measure_allocation(watch: Stopwatch) -> Curve:
    """Rates of getting a tensor's memory from the system: the time to fill a new tensor, less that to fill an existing
    one. The C library keeps small freed pieces and returns large ones at once, of which each page then causes a page
    fault when it is touched again. That can take ten times as long as the work on it."""

    def allocating_s(num_bytes: int) -> float:
        existing = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(NUM_ALIVE)]
        new_s = watch(lambda: [torch.empty(num_bytes, dtype=torch.uint8).fill_(0) for _ in existing])
        return (new_s - watch(lambda: [(torch.empty(1), tensor.fill_(0)) for tensor in existing])) / NUM_ALIVE

    taken_s = {num_bytes: median(allocating_s(num_bytes) for _ in range(NUM_ROUNDS)) for num_bytes in ALLOCATED_BYTES}
    rates = [num_bytes / max(LEAST_S, seconds_taken) for num_bytes, seconds_taken in taken_s.items()]
    return Curve([float(num_bytes) for num_bytes in ALLOCATED_BYTES], rates)


def host_watch(run: Run, most_wait_s: float = MOST_WAIT_S) -> float:
    """Seconds of the fastest of several calls. If other processes use the cores, threads wait for each other much
    longer than they work, so at most `most_wait_s` of waiting counts. That assumes threads that sleep while they wait,
    as in the children of the fork server (OMP_WAIT_POLICY=passive)."""
    end, least_s = time.perf_counter() + LEAST_MEASURING_S, float("inf")
    for num_calls in count(1):
        start, start_busy = time.perf_counter(), time.thread_time()
        run()
        busy_s, passed_s = time.thread_time() - start_busy, time.perf_counter() - start
        least_s = min(least_s, passed_s, busy_s + most_wait_s)
        if num_calls > 1 and time.perf_counter() > end:
            break
    return least_s


def card_watch(run: Run) -> float:
    """Seconds per call of many calls queued at once, by CUDA events."""
    run()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for num_calls in (2, 32):
        before.record()
        for _ in range(num_calls):
            run()
        after.record()
        after.synchronize()
        taken_s = before.elapsed_time(after) / 1e3
        if taken_s > LEAST_MEASURING_S:
            break
    return taken_s / num_calls


def overhead_s(device: torch.device) -> float:
    """Seconds of overhead per operator that a trace counts: the time of a network with modules, views and gradients but
    almost no work, forward and backward, divided by its number of operators."""
    width, num_layers = 8, 12
    layers = [nn.ModuleList([nn.LayerNorm(width), nn.Linear(width, width)]).to(device) for _ in range(num_layers)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    start = torch.zeros(1, 2, width, device=device)

    def run() -> None:
        x = start
        for norm, linear in layers:
            x = x + F.gelu(linear(norm(x))).view(1, 2, 2, 4).transpose(1, 2).flatten(2).view_as(x)
        torch.autograd.grad(x.sum(), weights)

    with Counting() as counting:
        run()
    # On a card another thread runs the backward pass, and waiting for it is part of the time.
    most_wait_s = float("inf") if device.type == "cuda" else MOST_WAIT_S
    return host_watch(run, most_wait_s) / len(counting.op_counter.lines)


def copies_of(device: torch.device, watch: Stopwatch) -> dict[str, float]:
    """Bytes/s of copies between pinned memory and a card, and of work on the host's processor."""
    on_card = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    numbers = torch.zeros(COPIED_BYTES // 4)
    return {
        Stream.TO_HOST.value: COPIED_BYTES / watch(lambda: on_host.copy_(on_card, non_blocking=True)),
        Stream.TO_DEVICE.value: COPIED_BYTES / watch(lambda: on_card.copy_(on_host, non_blocking=True)),
        Stream.HOST.value: 2 * COPIED_BYTES / host_watch(lambda: numbers.add_(1.0)),
    }
