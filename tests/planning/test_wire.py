"""What a plan says that ranks send to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.knobs.sharding import DDP, FSDP, ContextParallel, PipelineParallel, TensorParallel, ZeRO1
from lowvram.planning.devices import DeviceSpec
from lowvram.planning.estimate import PlanDevice, traffic
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import COLLECTIVES, sent_bytes
from lowvram.planning.trace.tracer import trace
from tests.laboratory import CPU, PROBLEMS, TOKENS, knobs_of, make_batch, my_slice
from tests.ranks import on_ranks
from tests.tiers import first_of

CONTROL_BYTES = 200  # of sums of losses and target counts, and of what ranks agree on
OPTIONS: dict[str, Knob] = {
    "ddp": DDP(),
    "zero1": ZeRO1(),
    "fsdp": FSDP(),
    "gathered once": FSDP(reshard_after_forward=False),
    "summed once": FSDP(reduce_every_part=False),
    "layers split": TensorParallel(),
    "layers split, tokens shared out between them": TensorParallel(sequence=True),
    "tokens shared out": ContextParallel(),
    "tokens shared out, weights sharded": FSDP(context=None),
    "tokens and states shared out": ZeRO1(context=None),
    "blocks spread": PipelineParallel(schedule="gpipe"),
}
COPIES: dict[str, Knob] = {
    "hsdp": FSDP(replicate=2),
    "gathered once": FSDP(replicate=2, reshard_after_forward=False),
    "summed once": FSDP(replicate=2, reduce_every_part=False),
    "of two": FSDP(reshard_after_forward=2),
    "states of parts of layers": ZeRO1(tensor=2),
}
PIPELINES: dict[str, Knob] = {
    name: PipelineParallel(pipeline=2, schedule="gpipe", copies=name) for name in ("ddp", "zero1", "fsdp")
}


def planned(knob: Knob, num_ranks: int, accum: str = "none") -> int:
    target = Target(None, num_ranks, knob.row_shape(num_ranks))
    found = trace(PROBLEMS["transformer"], knobs_of(sharding=knob, accum=accum), 8, target)
    return traffic(found, PlanDevice("cpu", DeviceSpec(), num_ranks))["wire_bytes"]


@pytest.mark.medium
def test_the_arithmetic_of_the_page() -> None:
    """docs/sharding.md: of P bytes of weights, (N - 1) / N of the whole tensors each time."""
    weights = sum(each.numel() * each.itemsize for each in PROBLEMS["transformer"].make_model().parameters())
    for knob, times, times_in_two in (
        (DDP(), 2, 2),
        (ZeRO1(), 2, 3),
        (FSDP(reshard_after_forward=False), 2, 4),
    ):
        for accum, expected in (("none", times), ("x2", times_in_two)):
            found = planned(knob, 4, accum)
            assert found == pytest.approx(expected * weights * 3 / 4, rel=0.02), (knob, accum)


@pytest.mark.medium
def test_copies_send_their_shards_once_a_step() -> None:
    """docs/sharding.md: two copies of two shards each. Weights and sums of gradients stay within a copy, in each part;
    of its half each rank sends 2 (R - 1) / R once between the copies."""
    weights = sum(each.numel() * each.itemsize for each in PROBLEMS["transformer"].make_model().parameters())
    knob, between_copies = FSDP(replicate=2, reshard_after_forward=False), 2 * weights / 2 / 2
    for accum, num_parts in (("none", 1), ("x2", 2)):
        within_a_copy = num_parts * 2 * weights / 2
        assert planned(knob, 4, accum) == pytest.approx(within_a_copy + between_copies, rel=0.02), accum


def sent_in_a_step(knobs: dict[str, Knob], accum: str = "none") -> list[int]:
    """By real ranks, in the second step with each of the knobs."""

    class Counting(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), named: Any = None) -> Any:
            if operator.namespace in COLLECTIVES:
                self.num_bytes += sent_bytes(operator, args)
            return operator(*args, **(named or {}))

    found: list[int] = []
    for knob in knobs.values():
        rig = assemble(PROBLEMS["transformer"], knobs_of(sharding=knob, accum=accum), CPU)
        batch = my_slice(make_batch(TOKENS, 8))
        step(rig, batch)
        with Counting() as counting:
            step(rig, batch)
        found.append(counting.num_bytes)
    return found


@pytest.mark.medium
@pytest.mark.parametrize("name", first_of(list(OPTIONS)))
def test_ranks_send_what_was_planned(name: str) -> None:
    (found,), _ = on_ranks(sent_in_a_step, {name: OPTIONS[name]})
    assert found == pytest.approx(planned(OPTIONS[name], 2), abs=CONTROL_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("accum", ["none", "x2"])
def test_four_ranks_send_what_was_planned(accum: str) -> None:
    """In copies, with shards that fewer ranks keep between the passes, or in rows that split layers."""
    expected = [planned(knob, 4, accum) for knob in COPIES.values()]
    for found in on_ranks(sent_in_a_step, COPIES, accum, num_ranks=4):
        for name, sent, wanted in zip(COPIES, found, expected, strict=True):
            assert sent == pytest.approx(wanted, abs=2 * CONTROL_BYTES), name


@pytest.mark.slow
@pytest.mark.parametrize("accum", ["none", "x2"])
def test_the_first_stage_of_two_pipelines_sends_what_was_planned(accum: str) -> None:
    expected = [planned(knob, 4, accum) for knob in PIPELINES.values()]
    found = on_ranks(sent_in_a_step, PIPELINES, accum, num_ranks=4)[0]
    for name, sent, wanted in zip(PIPELINES, found, expected, strict=True):
        assert sent == pytest.approx(wanted, abs=2 * CONTROL_BYTES), name


def test_a_link_is_busy_as_long_as_its_rate_says() -> None:
    found = trace(PROBLEMS["transformer"], knobs_of(sharding="ddp"), 8, Target(None, 2))
    device = PlanDevice("card", DeviceSpec(), 2)
    assert traffic(found, device)["wire_ms"] is None
    fields = traffic(found, replace(device, device=DeviceSpec(link_bytes_per_s=1e6)))
    assert fields["wire_ms"] == pytest.approx(fields["wire_bytes"] / 1e3)
    assert fields["wire_bytes_of"] == {"data": fields["wire_bytes"]}
    unknown = {"wire_bytes": None, "wire_bytes_of": None, "wire_ms": None}
    assert traffic(found, PlanDevice("card", DeviceSpec(), 1)) == unknown
