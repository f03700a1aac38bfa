"""adapter=progressive, lisa and badam: what a step takes, which one is measured, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.heaviest import fix_heaviest
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.adapter import BAdam, Lisa, Order, Progressive
from lowvram.knobs.adapter.over_time import OverTime, SwitchingStepper
from lowvram.knobs.stepping import InBackward
from lowvram.models.resnet import NormKind, ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, IMAGES, LARGER, TOKENS, knobs_of, make_batch, peak_as_planned
from tests.tiers import first_of

DEEP = Auto().pose(TransformerConfig(num_layers=8, width=64, num_heads=2, context=8), TOKENS)


def peak_of(rig: Rig, batch_size: int = 32) -> Peak:
    batch = make_batch(rig.task.spec, batch_size)  # pyright: ignore[reportAttributeAccessIssue]
    fix_heaviest(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        step(rig, batch)
    return peak


def of_training(peak: Peak) -> int:
    return peak.by_kind_max[Kind.GRADIENTS] + peak.by_kind_max[Kind.OPTIMIZER]


@pytest.mark.sampled
@pytest.mark.parametrize("stepping", ["after_backward", "in_backward", "cpu_offload"])
@pytest.mark.parametrize(("adapter", "blocks"), [(Lisa(blocks=2, every=2), 2), (BAdam(every=2), 1)])
def test_gradients_and_states_are_those_of_what_trains(adapter: Knob, blocks: int, stepping: str) -> None:
    """(active blocks + ends) / all, and 2 %."""
    rig, plain = (assemble(DEEP, knobs_of(stepping=stepping, **more), CPU) for more in ({"adapter": adapter}, {}))
    for seed in range(7):  # some switches
        step(rig, make_batch(TOKENS, 8, seed))
    sizes = [sum(map(torch.numel, block.parameters())) for block in DEEP.structure(rig.model).blocks]
    total = sum(map(torch.numel, rig.model.parameters()))
    share = (total - sum(sizes) + blocks * max(sizes)) / total
    found, wanted = peak_of(rig), peak_of(plain)
    if stepping != "cpu_offload":
        assert 0 < of_training(found) <= (share + 0.02) * of_training(wanted)
    else:  # masters of all stay on the host
        masters = rig.stepper.inner.masters.values()  # pyright: ignore[reportAttributeAccessIssue]
        kept = sum(master.nbytes for master in masters)
        beyond, wanted_beyond = (each.by_kind_max[Kind.HOST] - kept for each in (found, wanted))
        assert 0 < beyond <= (share + 0.02) * wanted_beyond


def test_what_is_frozen_from_the_bottom_up_keeps_no_activations() -> None:
    kinds = [
        peak_of(assemble(DEEP, knobs_of(adapter=Progressive(frozen=frozen)), CPU)).by_kind_max for frozen in range(9)
    ]
    activations = [each[Kind.ACTIVATIONS] for each in kinds]
    assert all(more > less for more, less in pairwise(activations[1:]))  # with 1 only the embedding is frozen
    assert activations[8] < activations[0] / 4
    assert peak_of(assemble(DEEP, knobs_of(adapter="lisa"), CPU)).by_kind_max[Kind.ACTIVATIONS] > activations[0] / 2


PYRAMID = Auto().pose(ResNetConfig(layers=[1, 1, 2], width=12, image_size=16, norm=NormKind.batch), IMAGES)
UNEVEN: dict[str, Problem] = {"pyramid": PYRAMID, "transformer": LARGER["transformer"]}


def possible(adapter: OverTime, num_blocks: int) -> Iterable[frozenset[int]]:
    """Every choice that comes up in the first periods."""
    return {adapter.active(step, num_blocks, seed=0) for step in range(0, 80 * 20, 20)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("problem", "batch_size"), first_of([(one, size) for size in (64, 2) for one in UNEVEN], 2))
@pytest.mark.parametrize(
    "adapter", [Lisa(1), Lisa(2), BAdam(), BAdam(2), BAdam(ends=False), BAdam(2, order=Order.ascending), Progressive()]
)
def test_no_step_takes_more_than_the_one_that_is_measured(adapter: OverTime, problem: str, batch_size: int) -> None:
    task = UNEVEN[problem]
    rig, batch = assemble(task, knobs_of(adapter=adapter), CPU), make_batch(task.spec, batch_size)
    stepper = rig.stepper
    assert isinstance(stepper, SwitchingStepper)
    largest = peak_of(rig, batch_size).peak_bytes
    choices = possible(adapter, len(task.structure(rig.model).blocks))
    assert len(rig.heaviest) <= 6
    for active in choices:
        stepper.hold(active)
        step(rig, batch)
        with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
            step(rig, batch)
        assert peak.peak_bytes <= largest, active


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem", LARGER)
@pytest.mark.parametrize("adapter", [Lisa(1), BAdam(), Progressive(frozen=2)])
@pytest.mark.parametrize(
    "others",
    first_of([{"stepping": InBackward(clip=0.5), "accum": "x2"}, {}, {"stepping": "cpu_offload", "ckpt": "every1"}]),
    ids=str,
)
def test_a_plan_is_what_is_measured(adapter: Knob, others: dict[str, str | Knob], problem: str) -> None:
    task, knobs = LARGER[problem], knobs_of(adapter=adapter, **others)
    rig = assemble(task, knobs, CPU)
    for seed in range(3):
        step(rig, make_batch(task.spec, 32, seed))
    planned, measured = peak_as_planned(task, knobs, 32), peak_of(rig)
    assert planned.peak_bytes == measured.peak_bytes
    assert planned.by_kind_max == measured.by_kind_max
