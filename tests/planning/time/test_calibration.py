"""Rates of the device that is here: how they are counted, drawn, kept and used. No real time is asserted."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.planning.target import Target
from lowvram.planning.time import calibration
from lowvram.planning.time.calibration import Calibration, Calibrations, Curve
from lowvram.planning.time.microbench import (
    ALLOCATED_BYTES,
    NUM_ALIVE,
    SAMPLES,
    Measurement,
    Run,
    Sample,
    calibrate,
    counted,
    curves_through,
    in_tf32,
    measure_allocation,
)
from lowvram.planning.time.op_class import FAMILIES, FLOP_FAMILIES, Family, family_of
from lowvram.planning.time.op_cost import FORMATS, STREAMS, Column, OpCounter, Stream
from lowvram.planning.time.roofline import step_time
from lowvram.planning.trace.tracer import trace
from lowvram.planning.worker import Planner
from tests.calls import TINY
from tests.laboratory import PROBLEMS, knobs_of, needs_gpu, needs_real_gpu
from tests.planning.test_worker import planned

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")
SMALL = [
    Sample(sample.family, sample.make, (12,) if sample.family not in FLOP_FAMILIES else (1,), ()) for sample in SAMPLES
]
CHOICES: list[dict[str, Any]] = [{}, {"ckpt": "every1"}, {"accum": "x4"}]
CALL_S, OVERHEAD_S = 1e-3, 1e-5
COPIED = (Stream.TO_HOST, Stream.TO_DEVICE, Stream.HOST)  # whose rates a card's calibration has


def flat(rate: float, **others: float) -> Calibration:
    """The same rate for everything in fp32, whatever its size, but for the families that are named."""
    rates = {family.value: others.get(family.name.lower(), rate) for family in FAMILIES}
    return Calibration({name: {"fp32": Curve([1.0], [each])} for name, each in rates.items()}, OVERHEAD_S, None)


def line(family: Family, amount: int, number_format: str = "fp32", stream: Stream = Stream.DEVICE) -> torch.Tensor:
    """(1, columns) of one operator."""
    work = torch.zeros(1, len(Column), dtype=torch.int64)
    work[0, Column.STREAM], work[0, Column.FAMILY] = STREAMS.index(stream), FAMILIES.index(family)
    work[0, Column.FORMAT] = FORMATS.index(number_format)
    work[0, Column.TIMES] = work[0, Column.CALLS] = 1
    work[0, Column.FLOPS if family in FLOP_FAMILIES else Column.BYTES] = amount
    return work


def seconds_of(work: torch.Tensor, rates: Calibration) -> float:
    found = step_time(work, rates)
    assert found is not None
    return found.step_ms / 1e3


def test_a_rate_is_what_one_call_does_in_its_time() -> None:
    """With a clock on which every call takes a millisecond."""
    found = calibrate(CPU, SMALL, lambda run: CALL_S)
    assert set(found.curves) == {family.value for family in FAMILIES}
    for sample in SMALL:
        size = 2 ** sample.on_cpu[0]
        amount, num_operators, name, _ = counted(
            in_tf32(sample.make(size, torch.float32, CPU), is_tf32=False), sample.family
        )
        curve = found.curves[sample.family.value]["fp32"]
        assert name == "fp32"
        assert curve.amounts == [amount]
        assert curve.rates == pytest.approx(
            [num_operators * amount / CALL_S], rel=1e-3
        )  # without memory: 10 ns at least
    assert found.copies is None
    assert found.overhead_s > 0


def test_samples_count_as_traces_do() -> None:
    """Three products of a layer; a convolution of the same size three times, two of them in the backward pass."""
    amounts = {
        s.family: counted(s.make(2, torch.bfloat16, CPU), s.family) for s in SAMPLES if s.family in FLOP_FAMILIES
    }
    assert amounts[Family.PRODUCT][:3] == (2 * 32 * 2 * 8, 3, "bf16")
    assert amounts[Family.PRODUCT].new_bytes.tolist() == [2 * 32 * 8, 2 * 32 * 2, 2 * 8 * 2]  # bf16
    forward, backward = amounts[Family.CONVOLUTION], amounts[Family.CONVOLUTION_BACKWARD]
    assert backward[0] == 2 * forward[0] == 2 * 2 * (2 * 16 * 16) * 32 * 32 * 9
    assert amounts[Family.ATTENTION_BACKWARD][0] == 2.5 * amounts[Family.ATTENTION][0]


FUSED = re.compile(r"aten::(_scaled_dot_product_(?:flash|efficient|cudnn)_attention(?:_for_cpu)?(?:_backward)?)")


def test_every_fused_attention_of_torch_is_known_as_such() -> None:
    """Which of them runs is torch's choice, by card and shape."""
    names = {found[1] for name in torch._C._dispatch_get_all_op_names() if (found := FUSED.fullmatch(name))}
    assert len(names) == 8
    for name in names:
        expected = Family.ATTENTION_BACKWARD if name.endswith("_backward") else Family.ATTENTION
        assert family_of(getattr(torch.ops.aten, name), is_product=True) is expected, name


def test_attention_by_cudnn_has_the_work_of_any_other() -> None:
    """On tensors without memory, as of a card."""
    shape, op_counter = (2, 4, 128, 64), OpCounter()
    op_counter.begin()
    with FakeTensorMode():
        query, key, value, gradient = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        args = (query, key, value, None, True, 0.0, True)
        out, logsumexp, *_ = made = torch.ops.aten._scaled_dot_product_cudnn_attention.default(*args)
        op_counter.note(torch.ops.aten._scaled_dot_product_cudnn_attention.default, args, {}, made)
        state = (out, logsumexp, out, out, None, None, None, 128, 128, 0.0, True)
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        op_counter.note(backward, (gradient, query, key, value, *state), {}, (query, key, value))
    forward_flops, backward_flops = op_counter.work()[:, Column.FLOPS].tolist()
    assert forward_flops == 2 * 4 * 128 * 128 * 64 * 2 * 2 // 2  # two products, half of them hidden by the mask
    assert backward_flops == forward_flops * 5 // 2


@pytest.mark.slow
def test_a_kernel_that_is_not_known_costs_its_own_rate_alone() -> None:
    def make(num: int, dtype: torch.dtype, device: torch.device) -> Run:
        numbers = torch.ones(num, dtype=dtype, device=device)
        return lambda: numbers + 1

    unknown = Sample(Family.ATTENTION, make, (12,), ())
    found = calibrate(CPU, [unknown, *SMALL[:1]], lambda run: CALL_S)
    assert set(found.curves) == {SMALL[0].family.value}


def test_memory_is_got_once_and_counted_apart_from_the_work_on_it() -> None:
    """Rates are those of the work alone; what an operator makes takes its time beside it, whatever it computes."""
    new_bytes = torch.tensor([10**6, 0])
    measurements = [Measurement(Family.MOVING, "fp32", 3e6, 2, new_bytes, lambda: None, 4e-3)]
    allocation = Curve([1.0], [1e9])
    curves = curves_through(measurements, allocation)
    assert curves["moving"]["fp32"].rates == pytest.approx([6e6 / 3e-3])
    assert curves_through(measurements, None)["moving"]["fp32"].rates == pytest.approx([6e6 / 4e-3])
    slow = Curve([1.0], [1e3])  # more than there is: most of the time stays memory's, and some the work's
    assert curves_through(measurements, slow)["moving"]["fp32"].rates == pytest.approx([6e6 / 4e-4])
    rates = Calibration(flat(1e9).curves, OVERHEAD_S, allocation=allocation)
    work = torch.cat([line(Family.PRODUCT, 10**6), line(Family.MOVING, 10**6)])
    work[:, Column.NEW] = new_bytes
    assert seconds_of(work, rates) == pytest.approx(seconds_of(work, flat(1e9)) + 1e-3)


def test_new_memory_is_measured_beside_memory_that_is_there() -> None:
    """With a clock on which new memory takes twice the time."""
    calls = count()
    curve = measure_allocation(lambda run: NUM_ALIVE * (CALL_S if next(calls) % 2 else 3 * CALL_S))
    assert curve.amounts == [float(num_bytes) for num_bytes in ALLOCATED_BYTES]
    assert curve.rates == pytest.approx([num_bytes / (2 * CALL_S) for num_bytes in ALLOCATED_BYTES])


def test_what_is_slow_is_not_tried_larger_and_what_fails_not_at_all() -> None:
    tried: list[tuple[int, torch.dtype]] = []

    def make(size: int, dtype: torch.dtype, device: torch.device) -> Run:
        tried.append((size, dtype))
        if dtype is torch.float16:
            raise NotImplementedError("no kernel")
        numbers = torch.ones(size, dtype=dtype, device=device)
        return lambda: numbers + numbers

    found = calibrate(CPU, [Sample(Family.MOVING, make, (4, 5, 6), ())], lambda run: 1.0)
    assert tried == [(16, torch.float32), (16, torch.bfloat16), (16, torch.float16)]
    assert set(found.curves[Family.MOVING.value]) == {"fp32", "bf16"}


def test_between_sizes_rates_are_drawn_by_logarithms_and_are_level_beyond() -> None:
    curve = Curve([1e3, 1e5], [1e9, 1e11])
    amounts = torch.tensor([0, 1, 1000, 10_000, 100_000, 10**9])
    assert curve.at(amounts).tolist() == pytest.approx([1e9, 1e9, 1e9, 1e10, 1e11, 1e11])
    assert Curve([1e3], [1e9]).at(amounts).tolist() == pytest.approx([1e9] * 6)


def test_an_operator_takes_its_work_at_its_rate_and_an_overhead() -> None:
    rates = flat(1e9, product=1e10)
    assert seconds_of(line(Family.MOVING, 10**6), rates) == pytest.approx(1e-3 + OVERHEAD_S)
    assert seconds_of(line(Family.PRODUCT, 10**6), rates) == pytest.approx(1e-4 + OVERHEAD_S)
    both = torch.cat([line(Family.MOVING, 10**6), line(Family.PRODUCT, 10**6)])
    assert seconds_of(both, rates) == pytest.approx(1.1e-3 + 2 * OVERHEAD_S)


def test_a_format_that_was_not_measured_moves_like_another_but_multiplies_like_none() -> None:
    rates = flat(1e9)
    assert seconds_of(line(Family.NORM, 10**6, "fp16"), rates) == seconds_of(line(Family.NORM, 10**6), rates)
    assert step_time(line(Family.PRODUCT, 10**6, "fp16"), rates) is None


def test_copies_of_a_cpu_take_its_own_time() -> None:
    """They read and write; beside a card they would be hidden by its work."""
    work = torch.cat([line(Family.PRODUCT, 10**9), line(Family.MOVING, 10**6, stream=Stream.TO_HOST)])
    alone = flat(1e9)
    assert seconds_of(work, alone) == pytest.approx(1 + 2e-3 + OVERHEAD_S)
    card = Calibration(alone.curves, OVERHEAD_S, {stream.value: 1e9 for stream in COPIED})
    assert seconds_of(work, card) == pytest.approx(1)


def test_a_card_waits_for_its_host_only_where_that_is_slower() -> None:
    card = Calibration(flat(1e9).curves, OVERHEAD_S, {stream.value: 1e9 for stream in COPIED})
    assert seconds_of(line(Family.MOVING, 10), card) == pytest.approx(OVERHEAD_S)
    assert seconds_of(line(Family.MOVING, 10**6), card) == pytest.approx(1e-3)


def test_no_time_is_known_of_what_goes_to_other_cards() -> None:
    """But offload=parameters gathers weights over a single rank, which sends nothing."""
    card = Calibration(flat(1e9).curves, OVERHEAD_S, {stream.value: 1e9 for stream in COPIED})
    work = line(Family.MOVING, 10**6)
    assert seconds_of(torch.cat([work, line(Family.MOVING, 0, stream=Stream.BY_DATA)]), card) == pytest.approx(1e-3)
    assert step_time(torch.cat([work, line(Family.MOVING, 1, stream=Stream.BY_DATA)]), card) is None


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_every_operator_of_a_step_has_a_rate(problem: str) -> None:
    """Recomputing takes longer, and more parts take more overhead."""
    rates = flat(1e9)
    works = [trace(PROBLEMS[problem], knobs_of(**choices), 8, Target()).work for choices in CHOICES]
    plain, again, parts = (seconds_of(work, rates) for work in works)
    assert plain < again
    assert plain < parts


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    measured: list[torch.device] = []

    def measure(device: torch.device) -> Calibration:
        measured.append(device)
        return Calibration(flat(1e9, product=2e9).curves, OVERHEAD_S, allocation=Curve([1.0, 2.0], [3.0, 4.0]))

    kept = Calibrations(tmp_path)
    assert kept.known(CPU) is None
    found = kept.get(CPU, "default", measure)
    assert kept.get(CPU, "default", measure).curves == found.curves
    again = Calibrations(tmp_path).known(CPU)
    assert again is not None
    assert measured == [CPU]
    assert calibration.to_plain(again) == calibration.to_plain(found) == calibration.to_plain(measure(CPU))
    assert measured.pop() == CPU
    assert kept.known(CPU, "tight") is None  # memory that is new each time is slower


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', "null"])
def test_what_cannot_be_read_is_measured_again(text: str, tmp_path: Path) -> None:
    kept = Calibrations(tmp_path)
    kept.get(CPU, "default", lambda device: flat(1e9))
    (path,) = tmp_path.iterdir()  # nothing else is left there
    whole = path.read_text()
    flipped = whole.replace("1000000000.0", "1000000008.0")
    for broken in (text, flipped, whole.replace("1000000000.0", "-1.0"), whole.replace("moving", "resting")):
        path.write_text(broken)
        assert kept.known(CPU) is None
        assert kept.get(CPU, "default", lambda device: flat(3e9)).curves == flat(3e9).curves


def test_other_threads_have_other_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Calibrations(tmp_path)
    kept.get(CPU, "default", lambda device: flat(1e9))
    monkeypatch.setattr(calibration, "num_threads", lambda: 1000)
    assert kept.known(CPU) is None


def test_a_place_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Calibrations(tmp_path / "file").get(CPU, "default", lambda device: flat(1e9)).overhead_s == OVERHEAD_S


def test_plans_for_this_cpu_take_what_is_known_and_measure_nothing(tmp_path: Path) -> None:
    kept = Calibrations(tmp_path)
    words = (*TINY, "plan.device=cpu")
    assert planned(*words, planner=Planner(calibrations=kept))["step_ms"] is None
    kept.get(CPU, "default", lambda device: flat(1e9))
    plan = planned(*words, planner=Planner(calibrations=kept))
    assert plan["step_ms"] > 0
    assert plan["step_ms_source"] == calibration.SOURCE
    card = planned(*TINY, "plan.device=rtx3060", planner=Planner(calibrations=kept))
    assert "assumed" in card["step_ms_source"]
    assert planned(*words, "vram=1GiB", planner=Planner(calibrations=kept))["step_ms"] is None  # allocator=tight then


@needs_real_gpu
@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=needs_gpu)], ids=str)
def test_a_card_has_rates_for_all_its_formats(device: torch.device) -> None:
    found = calibrate(device)
    assert found.copies is not None
    assert all(rate > 0 for rate in found.copies.values())
    assert all({"fp32", "fp16"} <= set(curves) for curves in found.curves.values())
    assert seconds_of(line(Family.PRODUCT, 10**12, "fp16"), found) < seconds_of(line(Family.PRODUCT, 10**12), found)
