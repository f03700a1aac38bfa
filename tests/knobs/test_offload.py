"""offload: what leaves the device, that each storage travels once, and that not a bit changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_compiler import set_activation_budget
from lowvram.config.errors import BadInput
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.knobs.ckpt import RecomputeSegments
from lowvram.knobs.offload import Activations, ActivationsOnDisk
from lowvram.knobs.offload.activations import Hooks
from lowvram.knobs.offload.buffers import in_host_memory
from lowvram.knobs.offload.transfer import Direct
from lowvram.knobs.stepping import InBackward, Norm
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, relative_error, train

pytestmark = pytest.mark.medium

OPTIONS = ["activations", "activations_disk"]
TOGETHER: list[dict[str, str | Knob]] = [
    {},
    {"ckpt": "every1"},
    {"ckpt": "every2"},
    {"ckpt": "sqrt"},
    {"accum": "x4"},
    {"precision": "bf16"},
    {"precision": "fp16", "accum": "x4", "ckpt": "every2"},
    {"stepping": InBackward(clip=0.1, norm=Norm.two_passes), "precision": "fp16"},  # two passes over one graph
    {"stepping": "cpu_offload", "accum": "x4", "logits": "chunked"},
    {"precision": "bf16_pure", "optimizer": "sgd"},
]


def words(choices: object) -> str | None:
    return "+".join(f"{group}={choice}" for group, choice in choices.items()) if isinstance(choices, dict) else None


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("choices", TOGETHER, ids=words)
@pytest.mark.parametrize("option", OPTIONS)
def test_not_a_bit_changes(option: str, choices: dict[str, str | Knob], problem: str) -> None:
    """Losses, gradients, parameters, BatchNorm's statistics; with dropout, and with ReLUs in place."""
    found, wanted = (
        train(PROBLEMS[problem], knobs_of(offload=offload, **choices), [8, 8, 7]) for offload in (option, "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0
    assert relative_error(found.parameters, wanted.parameters) == 0
    assert relative_error(found.buffers, wanted.buffers) == 0


# What travels


class Moved:
    """Bytes out and back since it was made."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        return host.traffic.to_host_bytes, host.traffic.to_device_bytes

    @property
    def bytes(self) -> tuple[int, int]:
        return self._now()[0] - self._before[0], self._now()[1] - self._before[1]


def look(option: str, problem: str, **choices: str | Knob) -> tuple[Peak, tuple[int, int]]:
    """The ledger of a second step, and what moved in it."""
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs_of(offload=option, **choices), CPU), make_batch(task.spec, 64)
    step(rig, batch)
    moved = Moved()
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak, moved.bytes


@pytest.mark.sampled
@pytest.mark.parametrize("ckpt", ["none", "every1", "every2"])
@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_storage_travels_once_each_way(option: str, problem: str, ckpt: str) -> None:
    """Host bytes are what the device doesn't hold, and no recomputed block sends anything."""
    plain, nothing = look("none", problem, ckpt=ckpt)
    peak, (out, back) = look(option, problem, ckpt=ckpt)
    assert nothing == (0, 0)
    assert out == back > 0
    assert out <= peak.by_kind_max[Kind.HOST] <= 1.05 * out
    assert peak.by_kind_max[Kind.HOST] <= plain.by_kind_max[Kind.ACTIVATIONS]
    assert peak.by_kind_max[Kind.ACTIVATIONS] < plain.by_kind_max[Kind.ACTIVATIONS]


BOUNDARY_BYTES = {"transformer": 64 * 8 * 16 * 4, "resnet": 64 * 8 * 4 * 4 * 4}  # 64 samples, between two blocks
OUTSIDE_BLOCKS: dict[str, dict[str, int]] = {
    "transformer": {
        "input of the last norm": BOUNDARY_BYTES["transformer"],
        "input of the head": BOUNDARY_BYTES["transformer"],
        "log-probabilities": 64 * 8 * 11 * 4,
    },
    "resnet": {"input of the stem's norm": BOUNDARY_BYTES["resnet"], "input of the head": 64 * 16 * 4},
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ckpt", "num_boundaries"), [("every1", 3), (RecomputeSegments(2), 2), (RecomputeSegments(3), 1)], ids=str
)
@pytest.mark.parametrize("problem", BOUNDARY_BYTES)
def test_of_recomputed_blocks_only_inputs_travel(problem: str, ckpt: str | Knob, num_boundaries: int) -> None:
    """Known to the byte: of three blocks these inputs, and what the layers outside of the blocks save."""
    _, (out, back) = look("activations", problem, ckpt=ckpt)
    assert out == back == num_boundaries * BOUNDARY_BYTES[problem] + sum(OUTSIDE_BLOCKS[problem].values())


def test_with_chunked_logits_no_log_probabilities_travel() -> None:
    _, (out, _) = look("activations", "transformer", ckpt="every1", logits="chunked")
    assert out == (3 + 2) * BOUNDARY_BYTES["transformer"]


def test_activations_fall_by_more_than_half() -> None:
    plain, peak = (look(option, "transformer")[0] for option in ("none", "activations"))
    assert peak.by_kind_max[Kind.ACTIVATIONS] < 0.5 * plain.by_kind_max[Kind.ACTIVATIONS]
    assert peak.peak_bytes < 0.5 * plain.peak_bytes


def test_parts_use_the_same_room() -> None:
    whole, parts = (look("activations", "transformer", accum=accum) for accum in ("none", "x4"))
    assert parts[0].by_kind_max[Kind.HOST] < 0.3 * whole[0].by_kind_max[Kind.HOST]


def test_evaluation_moves_nothing() -> None:
    task, moved = PROBLEMS["transformer"], Moved()
    rig = assemble(task, knobs_of(offload="activations"), CPU)
    with torch.no_grad():
        rig.criterion(rig.forward(part := make_batch(task.spec, 8)), part)
    assert moved.bytes == (0, 0)


# The hooks by themselves

WIDTH = 64
X_BYTES = 4 * 32 * WIDTH


def hooked(model: nn.Module, min_bytes: int = 1024) -> Hooks:
    return Hooks(model, CPU, min_bytes, in_host_memory(CPU), Direct(CPU))


def part_of(x: Tensor) -> Part:
    return Part(x, torch.zeros(len(x), dtype=torch.long))


def run(model: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor], min_bytes: int = 1024) -> Tensor:
    """The loss, its graph outside the device."""
    with hooked(model, min_bytes).active(part_of(x)):
        return function(model(x)).square().sum()


def test_weights_inputs_and_small_tensors_stay() -> None:
    model, x, moved = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH), Moved()
    loss = run(model, x, lambda y: y[0].clone())
    assert moved.bytes == (0, 0)  # of the saved: weight, input, a row of 256 bytes
    loss.backward()
    assert model.weight.grad is not None


def test_views_of_one_storage_travel_once() -> None:
    """As the parts of one projection to queries, keys and values."""
    model, x, moved = nn.Linear(WIDTH, 3 * WIDTH, bias=False), torch.randn(32, WIDTH), Moved()

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.chunk(3, dim=1)
        return q * k * v

    loss = run(model, x, attend)
    (qkv, q_times_k, product) = (3 * X_BYTES, X_BYTES, X_BYTES)
    assert moved.bytes == (qkv + q_times_k + product, 0)
    loss.backward()
    assert moved.bytes == (qkv + q_times_k + product,) * 2
    found = weight_grad(model)
    model.zero_grad()
    attend(model(x)).square().sum().backward()
    assert torch.equal(found, weight_grad(model))


def weight_grad(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_graph_can_be_walked_twice_and_gives_its_room_back_at_the_end() -> None:
    torch.manual_seed(0)
    model, x, moved = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH), Moved()
    hooks = hooked(model)
    with hooks.active(part_of(x)):
        loss = model(x).exp().exp().square().sum()
    grads = []
    for is_last in (False, True):
        loss.backward(retain_graph=not is_last)
        grads.append(weight_grad(model))
        model.zero_grad()
    assert torch.equal(*grads)
    assert moved.bytes == (2 * X_BYTES, 4 * X_BYTES)  # the last exp's result is also what is squared
    assert not hooks._copies
    assert len(hooks._pool._free) == 2
    with hooks.active(part_of(x)):
        model(x).exp().exp().square().sum().backward()
    assert len(hooks._pool._free) == 2


def test_a_graph_that_is_dropped_gives_its_room_back() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH)
    hooks = hooked(model)
    with hooks.active(part_of(x)):
        loss = model(x).exp().sum()
    del loss
    assert len(hooks._pool._free) == 1


def test_nothing_keeps_the_original_alive() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH)
    with hooked(model).active(part_of(x)):
        y = model(x).exp()
        storage = weakref.ref(y.untyped_storage())
        y = y.sum()
    gc.collect()
    assert storage() is None
    y.backward()


def test_no_output_holds_its_graph_in_a_circle() -> None:
    """A small output is saved by the node that made it."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(1, WIDTH)
    gc.collect()
    gc.disable()
    try:
        with hooked(model).active(part_of(x)):
            y = model(x).exp()
        alive = weakref.ref(y.untyped_storage())
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_the_value_at_the_time_of_saving_counts() -> None:
    """A change in place afterwards makes another copy; autograd alone would refuse to go backward."""
    model, x, moved = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH), Moved()

    def change(y: Tensor) -> Tensor:
        y = y.exp()
        before = y * y  # saves y
        return before + (y.detach().add_(1) * before)

    loss = run(model, x, change)
    assert moved.bytes[0] >= 3 * X_BYTES
    loss.backward()
    found = weight_grad(model)
    model.zero_grad()
    y = model(x).exp()
    before = y.clone() * y.clone()
    (before + ((y.detach() + 1) * before)).square().sum().backward()
    # exp saves its own result, which was changed in place after it was saved
    assert torch.equal(found, weight_grad(model))


def test_a_weight_that_changed_before_the_backward_pass_is_an_error_as_without_the_knob() -> None:
    model, x, second = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH), nn.Linear(WIDTH, WIDTH)
    loss = run(nn.Sequential(model, second), x, lambda y: y)
    with torch.no_grad():
        second.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved: \[64, 64\]"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
def test_compiled_blocks_send_what_eager_ones_do() -> None:
    """The hooks see what compiled code saves; bit by bit the same, with dropout."""
    task, results, sent = PROBLEMS["transformer_dropout"], [], []
    set_activation_budget(1.0)  # whatever an earlier test has left
    for option in ("none", "activations"):
        torch.compiler.reset()
        rig, moved = assemble(task, knobs_of(offload=option), CPU), Moved()
        for block in task.structure(rig.model).blocks:
            block.compile(backend="aot_eager")
        torch.manual_seed(0)
        for seed in range(2):
            step(rig, make_batch(task.spec, 32, seed))
        results.append(dict(rig.model.named_parameters()))
        sent.append(moved.bytes[0] / 2)
    assert relative_error(*results) == 0
    assert sent[0] == 0
    assert sent[1] > 100 * 4096


def test_a_buffer_is_used_again_by_size() -> None:
    pool = in_host_memory(CPU)
    large, small = pool.take(4000), pool.take(1000)
    for buffer in (small, large):
        pool.give_back(buffer)
    assert pool.take(1001) is not small
    assert pool.take(1000) is small
    assert pool.take(2000) is large  # twice as large
    pool.give_back(large)
    assert pool.take(1999) is not large


@pytest.mark.parametrize("field", ["min_bytes", "in_flight"])
@pytest.mark.parametrize("knob", [Activations, ActivationsOnDisk])
def test_sizes_out_of_range_are_refused(knob: Any, field: str) -> None:
    with pytest.raises(BadInput, match=rf"offload\.{field}=0: must be at least 1"):
        knob(**{field: 0})
