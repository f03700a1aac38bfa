"""The way to the host: what arrives, in whatever order it is waited for."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowvram.core import host, links
from lowvram.core.assemble import assemble
from lowvram.core.links import CudaLink
from lowvram.core.step import step
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, CpuOffload, InBackward, Norm, host_sums
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    make_batch,
    needs_gpu,
    relative_error,
    train,
)

CUDA = torch.device("cuda")


# A card's bookkeeping, with streams that a CPU plays: copies are made at once, but nobody knows when they have landed.


class Landed:
    """An event that has come at a random moment, at the latest when it is waited for."""

    def __init__(self, **_: Any) -> None:
        self.has_come = False

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        self.has_come = self.has_come or random.random() < 0.3
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True


class Played:
    """A stream."""

    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def played_card(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    monkeypatch.setattr(torch.cuda, "Stream", Played)
    monkeypatch.setattr(torch.cuda, "Event", Landed)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Played)
    monkeypatch.setattr(host_sums, "link_to", CudaLink)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("most_bytes", [0, 3000])
@pytest.mark.parametrize(
    ("stepping", "plain"),
    [
        (InBackward(0.3), AfterBackward(0.3)),
        (CpuOffload(0.3), AfterBackward(0.3)),
        (CpuOffload(offload_fraction=0.5), AfterBackward()),
    ],
    ids=["in_backward", "cpu_offload", "half"],
)
@pytest.mark.parametrize("parts", ["none", "x4"])
def test_the_bookkeeping_of_a_card_loses_nothing(
    played_card: None, monkeypatch: pytest.MonkeyPatch, most_bytes: int, stepping: Any, plain: Any, parts: str
) -> None:
    """fp16 skips the first steps, so that gradients are forgotten on the way, too."""
    monkeypatch.setattr(links, "IN_FLIGHT_BYTES", most_bytes)
    choices: Any = {"optimizer": "sgd", "accum": parts, "precision": Fp16(2.0**30, growth_interval=2)}
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(stepping=knob, **choices), [8] * 8, lr=0.01)
        for knob in (stepping, plain)
    )
    assert [update.applied for update in found.updates] == [update.applied for update in wanted.updates]
    assert relative_error(found.parameters, wanted.parameters) <= 1e-6


def test_so_many_bytes_are_in_flight_at_most(played_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "IN_FLIGHT_BYTES", 4 * 10)
    monkeypatch.setattr(Landed, "query", lambda self: self.has_come)
    link, totals = CudaLink(CPU), [torch.zeros(4) for _ in range(8)]
    waits = [link.add(total, torch.full((4,), float(index))) for index, total in enumerate(totals)]
    assert len(link.to_host) == 2
    for wait in waits:
        wait()
    assert [total[0].item() for total in totals] == list(range(8))
    assert sum(map(len, link.spare.values())) == 3  # one more than may be in flight: it starts before another lands


def test_a_gradient_leaves_the_card_once_it_has_landed_whoever_keeps_the_wait(played_card: None) -> None:
    """A stepper keeps the waits of all gradients until the update."""
    link, gradient = CudaLink(CPU), torch.ones(4)
    is_alive = weakref.ref(gradient)
    wait = link.fetch(torch.zeros(4), gradient)
    del gradient
    assert is_alive() is not None
    link.add(torch.zeros(4), torch.ones(4))()  # what left later has landed, so this one has too
    assert is_alive() is None
    wait()


def test_rounded_weights_wait_in_memory_that_is_used_again(played_card: None) -> None:
    link, weights = CudaLink(CPU), [torch.zeros(4, dtype=torch.bfloat16) for _ in range(3)]
    for _ in range(5):
        for index, weight in enumerate(weights):
            link.send(weight, torch.full((4,), index + 0.1))
        link.join()
        link.rest()
    assert not link.to_device
    assert 1 <= sum(map(len, link.spare.values())) <= 3
    assert [weight[0].item() for weight in weights] == [torch.tensor(x).bfloat16().item() for x in (0.1, 1.1, 2.1)]


# A real card


def busy() -> None:
    """Some milliseconds of work on the current stream."""
    torch.cuda._sleep(10_000_000)


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_wait_for_what_makes_them_and_memory_for_the_copies(dtype: torch.dtype) -> None:
    """The stream is late, and the source's memory would be used again at once."""
    link, size = CudaLink(CUDA), 2**22
    for number in range(1, 5):
        total = host.empty((size,), torch.float32, CUDA)
        for way in (link.fetch, link.add):
            busy()
            wait = way(total, torch.full((size,), float(number), dtype=dtype, device=CUDA))
            for _ in range(4):
                torch.full((size,), -1.0, dtype=dtype, device=CUDA)
        wait()
        assert bool((total == 2 * number).all())


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_sent_is_seen_after_joining_and_not_before_it_may(dtype: torch.dtype) -> None:
    link, size = CudaLink(CUDA), 2**22
    weight, master = torch.zeros(size, dtype=dtype, device=CUDA), host.empty((size,), torch.float32, CUDA)
    for number in range(1, 5):
        link.rest()
        master.fill_(float(number))
        busy()
        before = weight.clone()  # still computing with the old ones
        link.send(weight, master)
        link.join()
        assert bool((before == number - 1).all())
        assert bool((weight == number).all())


BIG = Auto().pose(replace(TRANSFORMER, num_layers=4, width=256), TOKENS)


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("accum", ["none", "x4"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    "make",
    [InBackward, lambda clip: InBackward(clip, Norm.two_passes), CpuOffload, lambda clip: CpuOffload(clip, 0.5)],
    ids=["in_backward", "two_passes", "cpu_offload", "half"],
)
def test_on_a_card_parameters_are_the_plain_loops(make: Any, clip: float | None, accum: str) -> None:
    found, wanted = (
        train(InDouble(BIG), knobs_of(stepping=knob, accum=accum), [16] * 20, device=CUDA)
        for knob in (make(clip), AfterBackward(clip))
    )
    assert relative_error(found.parameters, wanted.parameters) <= 1e-10


@pytest.mark.gpu
@needs_gpu[1]
def test_on_a_card_masters_are_pinned_and_the_state_leaves_it() -> None:
    held, state = {}, {}
    for option in ("after_backward", "cpu_offload"):
        state.clear()  # of the loop before
        gc.collect()
        rig = assemble(BIG, knobs_of(stepping=option), CUDA)
        for seed in range(2):
            step(rig, make_batch(TOKENS, 16, seed).to(CUDA))
        torch.cuda.synchronize()
        held[option] = torch.cuda.memory_allocated()
        state |= rig.stepper.state_dict()
        size = sum(parameter.nbytes for parameter in rig.trainable)
        del rig
    assert held["after_backward"] - held["cpu_offload"] >= 1.9 * size
    assert all(master.is_pinned() for master in state["masters"])
    assert all(type(master) is torch.Tensor for master in state["masters"])


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("stepping", [InBackward(0.1), CpuOffload(), CpuOffload(offload_fraction=0.5)])
def test_on_a_card_a_bad_gradient_changes_nothing(stepping: Any) -> None:
    rig = assemble(BIG, knobs_of(stepping=stepping), CUDA)
    before = [parameter.clone() for parameter in rig.trainable]
    rig.stepper.begin(1)
    rig.stepper.backward(torch.stack([parameter.sum() for parameter in rig.trainable]).sum() * torch.inf)
    assert not rig.stepper.update().applied
    assert all(torch.equal(one, other) for one, other in zip(rig.trainable, before, strict=True))
