"""How long the stages of a pipeline take together: as their papers say, and never less than they could."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from lowvram.config.errors import BadInput
from lowvram.core.stages import Pass, Way
from lowvram.knobs.sharding import DDP, FSDP, ContextParallel, PipelineParallel, TensorParallel
from lowvram.knobs.sharding.passes import check_parts, passes_of
from lowvram.planning.devices import DeviceSpec, load_device
from lowvram.planning.estimate import Fields, Pipeline, PlanDevice, times, traffic
from lowvram.planning.scaling import TraceScaler
from lowvram.planning.time.op_cost import STREAMS, Column, Stream
from lowvram.planning.time.pipeline_time import RankTime, Span
from lowvram.planning.time.roofline import LINK_EFFICIENCY, MESSAGE_S, DataSheet, StepTime, step_time
from lowvram.tasks import Auto
from tests.laboratory import TOKENS, TRANSFORMER, knobs_of
from tests.tiers import first_of

LINK = 200  # GB/s
NOTHING = StepTime(0, 0, 0, 0, 0)
FORWARD_MS, BACKWARD_MS = 2.0, 5.0


def rank(forward_ms: float, backward_ms: float, send_ms: float = 0.0, weights_ms: float = 0.0) -> RankTime:
    return RankTime(NOTHING, forward_ms, backward_ms, weights_ms, send_ms, 0.0)


def span_ms(ranks: list[RankTime], schedule: str, num_stages: int, num_parts: int) -> float:
    return Span(ranks, passes_of(schedule, len(ranks), num_stages, num_parts)).ms()


@pytest.mark.parametrize(("num_ranks", "num_parts"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_equal_stages_wait_as_long_as_the_papers_say(num_ranks: int, num_parts: int) -> None:
    """(p - 1) passes of a part in each direction; with v stages on each rank 1/v of that (Narayanan et al., 2021)."""
    both_ms = FORWARD_MS + BACKWARD_MS
    ranks = [rank(FORWARD_MS, BACKWARD_MS)] * num_ranks
    for schedule in ("gpipe", "1f1b"):
        assert span_ms(ranks, schedule, 1, num_parts) == pytest.approx((num_parts + num_ranks - 1) * both_ms)
    halves = [rank(FORWARD_MS / 2, BACKWARD_MS / 2)] * num_ranks
    expected = num_parts * both_ms + (num_ranks - 1) * both_ms / 2
    assert span_ms(halves, "interleaved", 2, num_parts) == pytest.approx(expected)


@pytest.mark.parametrize(("num_ranks", "num_parts"), [(2, 4), (3, 6), (4, 12)])
def test_ranks_that_hold_back_wait_a_third(num_ranks: int, num_parts: int) -> None:
    """Where all three take as long: (p - 1) (forward + backward - weights) instead of their sum (Qi et al., 2023)."""
    ranks = [rank(1.0, 1.0, weights_ms=1.0)] * num_ranks
    assert span_ms(ranks, "zero_bubble", 1, num_parts) == pytest.approx(3 * num_parts + num_ranks - 1)


@pytest.mark.parametrize("seed", range(3))
def test_stages_drawn_at_random_take_as_long_as_the_slowest_and_not_much_longer(seed: int) -> None:
    random = Random(seed)
    for _ in range(30):
        num_ranks, send_ms = random.randint(2, 5), random.choice([0.0, 0.3])
        num_parts = num_ranks * random.randint(1, 4)
        ranks = [rank(random.uniform(1, 3), random.uniform(2, 6), send_ms) for _ in range(num_ranks)]
        through_ms = sum(each.forward_ms + each.backward_ms for each in ranks) + 2 * send_ms * (num_ranks - 1)
        slowest_ms = max(each.forward_ms + each.backward_ms for each in ranks)
        for schedule in ("gpipe", "1f1b"):
            found = span_ms(ranks, schedule, 1, num_parts)
            assert found >= max(through_ms, num_parts * slowest_ms) - 1e-9
            assert found <= through_ms + (num_parts - 1) * (2 * slowest_ms + 4 * send_ms) + 1e-9


def test_messages_are_waited_for() -> None:
    ranks = [rank(1.0, 1.0, send_ms=0.5), rank(1.0, 1.0)]
    assert span_ms(ranks, "gpipe", 1, 1) == pytest.approx(1 + 0.5 + 1 + 1 + 0.5 + 1)


WAYS = {
    schedules.FORWARD: Way.FORWARD,
    schedules.FULL_BACKWARD: Way.BACKWARD,
    schedules.BACKWARD_INPUT: Way.BACKWARD,
    schedules.BACKWARD_WEIGHT: Way.WEIGHTS,
}
OF_TORCH: dict[str, Any] = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}


@pytest.mark.parametrize(
    ("name", "num_stages"), [("interleaved", 2), ("interleaved", 3), *(("zero_bubble", each) for each in (1, 2, 3))]
)
def test_the_order_is_that_of_torchs_schedules(name: str, num_stages: int) -> None:
    for num_ranks in (2, 3, 4):
        for num_parts in range(num_ranks * num_stages, 17):
            real = object.__new__(OF_TORCH[name])
            real.n_local_stages, real.pp_group_size, real._n_microbatches = num_stages, num_ranks, num_parts
            num_rounds = max(1, num_parts // num_ranks)
            if num_parts % num_rounds:
                with pytest.raises(BadInput, match=f"accum.parts={num_parts}: must be a multiple of {num_ranks}"):
                    check_parts(name, num_ranks, num_stages, num_parts)
                continue
            check_parts(name, num_ranks, num_stages, num_parts)
            real.number_of_rounds, real.microbatches_per_round = num_rounds, num_parts // num_rounds
            for number, order in enumerate(passes_of(name, num_ranks, num_stages, num_parts)):
                actions = [each for each in real._calculate_single_rank_operations(number) if each is not None]
                wanted = [
                    Pass(each.stage_index, each.microbatch_index or 0, WAYS[each.computation_type]) for each in actions
                ]
                assert order == wanted


def test_fewer_parts_than_stages_are_refused() -> None:
    check_parts("gpipe", 4, 1, 1)
    for schedule, num_stages, num_parts in (("1f1b", 1, 3), ("interleaved", 2, 7)):
        with pytest.raises(BadInput, match=f"accum.parts={num_parts}: must be at least {4 * num_stages}, the number"):
            check_parts(schedule, 4, num_stages, num_parts)


CARD = load_device("rtx4090")
DEEP = Auto().pose(replace(TRANSFORMER, num_layers=4, num_heads=4), TOKENS)
NUM_RANKS = 4
LAYOUTS: dict[str, tuple[Any, str]] = {  # and along which dimension most goes
    "ddp": (DDP(), "data"),
    "fsdp": (FSDP(), "data"),
    "tensor": (TensorParallel(), "tensor"),
    "own tokens": (TensorParallel(sequence=True), "tensor"),
    "rows": (FSDP(tensor=2), "tensor"),
    "tokens": (ContextParallel(), "context"),
    "stages": (PipelineParallel(schedule="gpipe"), "pipeline"),
    "stages of two": (PipelineParallel(schedule="gpipe", tensor=2), "tensor"),
}


def planned(name: str, link_bytes_per_s: float | None, device: DeviceSpec = CARD) -> Fields:
    knob = LAYOUTS[name][0]
    knobs, row = knobs_of(sharding=knob), knob.row_shape(NUM_RANKS)
    del knobs["accum=none"]
    plan_device = PlanDevice("rtx4090", device, NUM_RANKS, row, link_of_plan=link_bytes_per_s)
    traces = [TraceScaler(DEEP, each).trace(knobs, 4, 64).trace for each in plan_device.target.stages()]
    passes = knob.passes(row, 4)
    pipeline = None if passes is None else Pipeline(traces, passes)
    return {**times(traces[0], plan_device, pipeline), **traffic(traces[0], plan_device)}


@pytest.mark.medium
@pytest.mark.parametrize("name", first_of(list(LAYOUTS), 3))
def test_the_slower_the_link_the_longer_a_step(name: str) -> None:
    found = [planned(name, rate) for rate in (1e15, 1e9, 1e7, 1e5)]
    step_ms = [each["step_ms"] for each in found]
    assert step_ms == sorted(step_ms)
    assert step_ms[-1] > 2 * step_ms[0]
    for each in found:
        assert sum(each["step_ms_of"].values()) == pytest.approx(each["step_ms"])
        assert sum(each["wire_bytes_of"].values()) == each["wire_bytes"]
        assert max(each["wire_bytes_of"], key=each["wire_bytes_of"].get) == LAYOUTS[name][1]
    waited_for = "bubble" if name == "stages" else "ranks"
    assert found[-1]["step_ms_of"][waited_for] > 0.5 * step_ms[-1]


def test_what_holds_up_the_computation_takes_longer_than_what_runs_beside_it() -> None:
    """A second of messages about gradients, or about a layer's outputs, beside a second of work."""
    work = torch.zeros(2, len(Column), dtype=torch.int64)
    work[:, Column.TIMES] = 1
    work[:, Column.BYTES] = 10**9
    alone = step_time(work[:1], DataSheet(CARD), 1e9)
    for stream in (Stream.BY_DATA, Stream.BY_TENSOR, Stream.BY_CONTEXT):
        work[1, Column.STREAM] = STREAMS.index(stream)
        both = step_time(work, DataSheet(CARD), LINK * 1e9)
        assert alone is not None
        assert both is not None
        message_ms = 1e3 / LINK_EFFICIENCY / LINK + 1e3 * MESSAGE_S
        expected = max(alone.step_ms, message_ms) if stream is Stream.BY_DATA else alone.step_ms + message_ms
        assert both.step_ms == pytest.approx(expected, rel=1e-6)
        assert step_time(work, DataSheet(CARD), None) is None


@pytest.mark.medium
def test_without_a_rate_of_the_link_no_time_is_known() -> None:
    for name in ("ddp", "stages"):
        assert planned(name, None)["step_ms"] is not None  # that of the data sheet
        found = planned(name, None, replace(CARD, link_bytes_per_s=None))
        assert (found["step_ms"], found["wire_ms"]) == (None, None)
        assert found["wire_bytes"] > 0
