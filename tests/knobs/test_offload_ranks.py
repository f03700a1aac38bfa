"""offload=parameters over several ranks: each keeps its shards in its host's memory, and numbers are those of one
process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, conflicts
from lowvram.core.ledger import Peak, ledger
from lowvram.core.shards import local
from lowvram.core.step import step
from lowvram.knobs.sharding import FSDP
from lowvram.knobs.stepping import AfterBackward, InBackward
from lowvram.tasks import Auto
from tests.knobs.test_sharding import errors, train_each
from tests.laboratory import (
    CPU,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    make_batch,
    my_slice,
    named,
)
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

Choices = dict[str, str | Knob]
THREE = [32, 32, 27]
TOGETHER: dict[str, Choices] = {
    "parts": {"optimizer": "sgd", "accum": "x2", "stepping": AfterBackward(clip=0.5)},
    "in_backward": {"optimizer": "sgd", "stepping": InBackward()},
    "chunked": {"optimizer": "sgd", "logits": "chunked", "ckpt": "every1"},
}
VARIANTS: dict[str, tuple[FSDP, int]] = {
    "thirds": (FSDP(), 3),
    "gathered": (FSDP(reshard_after_forward=False), 2),
    "bandwidth": (FSDP(reduce_every_part=False), 2),
    "copies": (FSDP(replicate=2), 4),
    "of_two": (FSDP(reshard_after_forward=2), 4),
}
ON_HOST: Choices = {"sharding": "fsdp", "offload": "parameters"}


@pytest.mark.parametrize("variant", first_of([["thirds"], list(VARIANTS)[1:]]))
def test_ranks_train_like_one_process(variant: list[str]) -> None:
    task = InDouble(PROBLEMS["transformer"])
    wanted = train_each(task, list(TOGETHER.values()), THREE)
    for name in variant:
        sharding, num_ranks = VARIANTS[name]
        choices: list[Choices] = [{**each, **ON_HOST, "sharding": sharding} for each in TOGETHER.values()]
        for found in on_ranks(train_each, task, choices, THREE, num_ranks=num_ranks):
            for about, one, other in zip(TOGETHER, found, wanted, strict=True):
                assert max(errors(one, other)[what] for what in ("losses", "gradients", "buffers")) <= 1e-12, about
                norms = [[float(update.grad_norm) for update in each.updates] for each in (one, other)]
                assert norms[0] == pytest.approx(norms[1], rel=1e-12), (name, about)


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["resnet_frozen", "transformer_dropout"])
def test_states_of_eight_bits_and_autocast_have_the_losses_of_shards_on_the_device(problem: str) -> None:
    more: list[Choices] = [{"optimizer": "adamw_8bit"}, {"precision": "bf16"}, {"precision": "fp16", "accum": "x2"}]
    choices = [{**each, **ON_HOST, **where} for each in more for where in ({}, {"offload": "none"})]
    for found in on_ranks(train_each, PROBLEMS[problem], choices, THREE):
        for one, other in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(torch.stack(one.losses), torch.stack(other.losses), rtol=1e-5, atol=0)


DEEP = Auto().pose(replace(TRANSFORMER, num_layers=4, width=128), TOKENS)


def peak_and_traffic(choices: Choices) -> tuple[Peak, int, int, int]:
    """The ledger of a later step; the bytes that it moved to the host and back, and those of this rank's shards."""
    rig, batch = assemble(DEEP, knobs_of(**choices), CPU), my_slice(make_batch(TOKENS, 32))
    step(rig, batch)
    before = replace(host.traffic)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        step(rig, batch)
    to_host = host.traffic.to_host_bytes - before.to_host_bytes
    to_device = host.traffic.to_device_bytes - before.to_device_bytes
    assert ("offload" in choices) == all(host.holds(each) for each in rig.model.parameters())
    return peak, to_host, to_device, sum(local(each).nbytes for each in rig.model.parameters())


def test_a_rank_keeps_its_share_on_the_host_and_nothing_of_it_on_the_device() -> None:
    (alone, *_), (there, *_) = peak_and_traffic({}), peak_and_traffic({"offload": "parameters"})
    of_ranks = on_ranks(peak_and_traffic, ON_HOST)
    kept = sum(alone.by_kind_max[kind] for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER))
    for peak, to_host, to_device, own in of_ranks:
        assert peak.by_kind_max[Kind.OPTIMIZER] == 0
        assert peak.by_kind_max[Kind.PARAMETERS] < alone.by_kind_max[Kind.PARAMETERS] / 2
        assert kept * 0.45 < peak.by_kind_max[Kind.HOST] < there.by_kind_max[Kind.HOST] * 0.52
        assert to_host == own
        assert own < to_device < 2 * own  # those of blocks twice


@pytest.mark.parametrize("option", ["ddp", "zero1"])
def test_whoever_keeps_whole_weights_is_refused(option: str) -> None:
    (reason,) = conflicts(named(("sharding", option), ("offload", "parameters")), {Fact.ONE_RANK: "it has two"}, {})
    needed = "offload=parameters needs that each rank keeps only its own share of the weights"
    assert reason == f"{needed}, and sharding={option} ends that"
