"""offload on streams: the order of copies, without a card. Copies run as late as the order allows, and memory that was
let go of too early reads as nan: whatever is missing in the order shows in the numbers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowvram.core import host
from lowvram.core.knob import Knob
from lowvram.core.rig import Part
from lowvram.knobs.offload import Activations, activations
from lowvram.knobs.offload.activations import Hooks
from lowvram.knobs.offload.buffers import in_host_memory
from lowvram.knobs.offload.transfer import Streams
from tests.laboratory import CPU, PROBLEMS, Trained, knobs_of, needs_gpu, relative_error, train


class LateStream:
    """Runs nothing before somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: list[Any] = []
        self.num_done = 0
        self.is_behind = False  # the next copy starts after what was computed so far

    def wait_event(self, event: LateEvent) -> None:
        self.pending.append(event.wait)

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, Computing)  # which is always done
        self.is_behind = True

    def run(self, num_jobs: int) -> None:
        while self.num_done < num_jobs:
            job, self.num_done = self.pending[self.num_done], self.num_done + 1
            job()


class Computing:
    """The computing stream: whatever is asked of it runs at once."""

    def wait_event(self, event: LateEvent) -> None:
        event.wait()


class LateEvent:
    def record(self, stream: LateStream) -> None:
        self.stream, self.num_jobs = stream, len(stream.pending)

    def wait(self) -> None:
        self.stream.run(self.num_jobs)


class Simulation:
    """CUDA's streams, as far as offload uses them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: LateStream | None = None
        self.recorded: set[int] = set()  # tensors that the allocator knows of
        self.mistakes: list[str] = []
        copy_at_once, computing = Tensor.copy_, Computing()

        def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy_at_once(to, source)
            assert self.current is not None
            self.mistakes += [] if self.current.is_behind else ["a copy may start too early"]
            self.current.is_behind = False
            self.current.pending.append(self.late_copy(to, source, copy_at_once))
            return to

        patch.setattr(Tensor, "copy_", copy)
        patch.setattr(Tensor, "record_stream", lambda tensor, _: self.recorded.add(id(tensor)))
        patch.setattr(torch.cuda, "Stream", LateStream)
        patch.setattr(torch.cuda, "Event", LateEvent)
        patch.setattr(torch.cuda, "stream", self.switched)
        patch.setattr(torch.cuda, "current_stream", lambda _: computing)

    @contextmanager
    def switched(self, stream: LateStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def late_copy(self, to: Tensor, source: Tensor, copy_at_once: Callable[..., Tensor]) -> Callable[[], None]:
        get_to, get_source, name = reference(to), reference(source), id(to)

        def run() -> None:
            to, source = get_to(), get_source()
            if to is None:
                self.mistakes += [] if name in self.recorded else ["free memory was written"]
            elif source is None:
                to.fill_(math.nan if to.is_floating_point() else 1)
            else:
                copy_at_once(to, source)

        return run


def reference(tensor: Tensor) -> Callable[[], Tensor | None]:
    """A buffer's memory stays; that of the device is somebody else's once the tensor is gone."""
    return (lambda: tensor) if host.is_marked(tensor.untyped_storage()) else weakref.ref(tensor)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


def on_streams(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> Activations:
    """The knob, on a CPU that plays a card."""
    monkeypatch.setattr(activations, "transfer_for", Streams)
    return Activations(min_bytes=512, in_flight=in_flight)


TOGETHER: list[dict[str, str | Knob]] = [
    {},
    {"ckpt": "every2", "accum": "x4"},
    {"precision": "bf16", "ckpt": "every1"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("choices", TOGETHER, ids=lambda choices: "+".join(map(str, choices.values())))
@pytest.mark.parametrize("in_flight", [1, 4])
def test_copies_that_are_late_change_nothing(
    in_flight: int,
    choices: dict[str, str | Knob],
    problem: str,
    simulation: Simulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, sizes, moved_before = PROBLEMS[problem], [8, 8, 7], host.traffic.to_device_bytes
    wanted = train(task, knobs_of(**choices), sizes)
    found = train(task, knobs_of(offload=on_streams(monkeypatch, in_flight), **choices), sizes)
    assert host.traffic.to_device_bytes > moved_before
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0
    assert relative_error(found.buffers, wanted.buffers) == 0
    assert not simulation.mistakes


WIDTH, DEPTH = 32, 12
ONE_BYTES = 4 * 16 * WIDTH


def deep() -> tuple[nn.Linear, Part, Hooks, Any]:
    """A first layer; what follows it saves one storage per exponential."""
    torch.manual_seed(0)
    transfer = Streams(CPU, in_flight=3)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(16, WIDTH)
    hooks = Hooks(model, CPU, 1024, in_host_memory(CPU), transfer)
    return model, Part(x, torch.zeros(16, dtype=torch.long)), hooks, transfer


def loss_of(model: nn.Linear, part: Part, hooks: Hooks) -> Tensor:
    with hooks.active(part):
        y = model(part.inputs)
        for _ in range(DEPTH):
            y = y.exp().mul(0.1)
        return y.sum()


def left(transfer: Any) -> list[Any]:
    """All storages that left, in that order. (`Hooks` forgets one whose address is used again.)"""
    return [away for reference in transfer._order if (away := reference())]


def away_now(transfer: Any) -> list[bool]:
    """Of each storage, in the order of leaving: whether it is on the device too."""
    return [away.here is not None for away in left(transfer)]


def test_few_leave_and_few_come_back_at_a_time(simulation: Simulation) -> None:
    model, part, hooks, transfer = deep()
    loss = loss_of(model, part, hooks)
    assert away_now(transfer) == [False] * (DEPTH - 3) + [True] * 3
    away = left(transfer)
    transfer.come_back(away[8])
    assert away_now(transfer) == [False] * 5 + [True] * 7  # 8, which was asked for, and three before it
    transfer.let_go(away[8])
    assert away_now(transfer) == [False] * 5 + [True] * 3 + [False] + [True] * 3
    del away
    loss.backward()
    assert not simulation.mistakes


def test_a_graph_is_walked_twice(simulation: Simulation) -> None:
    """The last few, which had not left when they were wanted, and all others."""
    model, part, hooks, transfer = deep()
    grads = []
    loss = loss_of(model, part, hooks)
    for is_last in (False, True):
        before = host.traffic.to_device_bytes
        loss.backward(retain_graph=not is_last)
        assert host.traffic.to_device_bytes - before == (DEPTH - 3) * ONE_BYTES
        grads.append(model.weight.grad)
        model.zero_grad()
    assert torch.equal(*grads)
    assert transfer._num_alive == 0
    assert not simulation.mistakes


def test_a_graph_that_is_dropped_while_something_comes_back(simulation: Simulation) -> None:
    """What came ahead and is read by nobody: the allocator is told."""
    model, part, hooks, transfer = deep()
    loss = loss_of(model, part, hooks)
    storages = left(transfer)
    transfer.come_back(storages[5])
    assert away_now(transfer)[2:6] == [True] * 4
    del storages, loss
    transfer._back.run(len(transfer._back.pending))
    assert not simulation.mistakes
    assert simulation.recorded


def test_a_change_in_place_while_it_leaves_is_an_error(simulation: Simulation) -> None:
    model, part, hooks, _ = deep()
    with hooks.active(part):
        y = model(part.inputs).exp()
        loss = y.mul(1).sum()
        y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")  # of kernels that have no deterministic sister
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("option", ["activations", "activations_disk"])
@needs_gpu[0]
@needs_gpu[1]
def test_not_a_bit_changes_on_a_card(option: str, problem: str) -> None:
    """Deterministic kernels, as far as there are; large enough that copies take a while."""
    device = torch.device("cuda")

    def steps(offload: str | Knob) -> Trained:
        return train(PROBLEMS[problem], knobs_of(offload=offload, ckpt="every2"), [512] * 5, device=device)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            found, wanted = steps(option), steps("none")
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0
    assert relative_error(found.buffers, wanted.buffers) == 0


@needs_gpu[0]
@needs_gpu[1]
def test_pinned_room_is_made_once_and_less_stays_on_the_card() -> None:
    device = torch.device("cuda")
    peaks, buffers = {}, 0
    for in_flight in (0, 2):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24))).to(device)
        x = torch.randn(4096, 1024, device=device)
        transfer = Streams(device, in_flight or 1)
        hooks = Hooks(model, device, 1024, in_host_memory(device), transfer)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            with hooks.active(Part(x, x[:, 0])) if in_flight else nullcontext():
                loss = model(x).square().sum()
            loss.backward()
            buffers = len(hooks._pool._free)
        torch.cuda.synchronize()
        peaks[in_flight] = torch.cuda.max_memory_allocated()
        assert all(buffer.bytes.is_pinned() for buffer in hooks._pool._free)
        assert (buffers > 0) == (in_flight > 0)
    assert peaks[2] < 0.6 * peaks[0]
