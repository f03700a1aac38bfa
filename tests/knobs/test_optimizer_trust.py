"""optimizer=lars and lamb: the formulas of the papers, over all shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.rounding import Split, Stochastic
from lowvram.core.shards import whole, whole_norms
from lowvram.core.step import step
from lowvram.knobs.optimizer import LAMB, LARS
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of, train
from tests.ranks import on_ranks

PIECES = "lowvram.knobs.optimizer.trust.PIECE_ELEMENTS"
SHAPES = ((24, 6), (65, 3), (8, 3, 5, 5), (70,), (), (0, 4), (5, 4))
OF_ZEROS = len(SHAPES) - 1  # the place of a weight that begins as zeros
LARS_, LAMB_ = LARS(0.5, 0.8, 0.02, 0.1), LAMB(0.05, 0.8, 0.9, 1e-6, 0.2)
KNOBS = pytest.mark.parametrize("knob", [LARS_, replace(LARS_, momentum=0.0), LAMB_], ids=["lars", "plain", "lamb"])


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    if seed == 0:
        tensors[OF_ZEROS].zero_()
    return tensors


def lars(knob: LARS, weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Equations 5 and 6 of You et al. (2017), and SGD with momentum as in their algorithm 1."""
    velocity = torch.zeros_like(weight)
    for gradient in gradients:
        decay, local_lr = knob.weight_decay if weight.ndim >= 2 else 0.0, 1.0
        if weight.ndim >= 2 and weight.norm() > 0 and gradient.norm() > 0:
            local_lr = knob.trust * float(weight.norm() / (gradient.norm() + decay * weight.norm()))
        velocity = knob.momentum * velocity + knob.lr * local_lr * (gradient + decay * weight)
        weight = weight - velocity
    return weight


def lamb(knob: LAMB, weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Algorithm 2 of You et al. (2019)."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients, 1):
        first = knob.beta1 * first + (1 - knob.beta1) * gradient
        second = knob.beta2 * second + (1 - knob.beta2) * gradient**2
        ratio = (first / (1 - knob.beta1**number)) / ((second / (1 - knob.beta2**number)).sqrt() + knob.eps)
        update, trust = ratio + (knob.weight_decay * weight if weight.ndim >= 2 else 0), 1.0
        if weight.ndim >= 2 and weight.norm() > 0 and update.norm() > 0:
            trust = float(weight.norm() / update.norm())
        weight = weight - knob.lr * trust * update
    return weight


def updated(knob: LARS | LAMB, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = knob.make(parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for parameter, gradient in zip(parameters, each, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("piece_elements", [2**21, 64, 200])
@KNOBS
def test_updates_are_the_papers_in_pieces_of_any_size(
    knob: LARS | LAMB, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PIECES, piece_elements)
    weights, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3, 4)]
    found = updated(knob, weights, gradients)
    for place, weight in enumerate(weights):
        own = [each[place] for each in gradients]
        wanted = lars(knob, weight, own) if isinstance(knob, LARS) else lamb(knob, weight, own)
        torch.testing.assert_close(found[place], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("knob", [LARS(weight_decay=0.0), LAMB(weight_decay=0.0)], ids=["lars", "lamb"])
def test_without_a_gradient_a_layer_stays(knob: LARS | LAMB) -> None:
    """Its ratio would be 0 / 0 or infinite."""
    weight = torch.randn(3, 4)
    assert torch.equal(updated(knob, [weight], [[torch.zeros(3, 4)]])[0], weight)


def test_a_layers_step_does_not_depend_on_the_size_of_gradients() -> None:
    """So no loss scale, and no number of samples, can make it too large."""
    weight, gradient = torch.randn(6, 5).double(), torch.randn(6, 5).double()
    for knob in (LARS(weight_decay=0.0), LAMB(weight_decay=0.0, eps=1e-30)):
        small, large = (updated(knob, [weight], [[gradient * scale]])[0] for scale in (1e-3, 1e3))
        torch.testing.assert_close(small, large, rtol=1e-12, atol=0)


def sharded(knob: LARS | LAMB) -> tuple[list[Tensor], int]:
    """The weights after four updates of their shards, and how often ranks met in one update of all."""
    mesh = init_device_mesh("cpu", (data_ranks().size,))
    shapes = [place for place, shape in enumerate(SHAPES) if shape]  # a number can't be sharded
    parameters = [nn.Parameter(distribute_tensor(drawn(0)[place], mesh, [Shard(0)])) for place in shapes]
    optimizer = knob.make(parameters)
    meetings = []
    original = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **kwargs: (meetings.append(1), original(*args, **kwargs))[1]
    for seed in (1, 2, 3, 4):
        for place, parameter in zip(shapes, parameters, strict=True):
            parameter.grad = distribute_tensor(drawn(seed)[place], mesh, [Shard(0)])
        optimizer.step()
    torch.distributed.all_reduce = original
    return [whole(parameter) for parameter in parameters], len(meetings)


def on_all(knobs: list[LARS | LAMB]) -> list[tuple[list[Tensor], int]]:
    return [sharded(knob) for knob in knobs]


CHOICES: list[dict[str, str]] = [{}, {"stepping": "in_backward"}, {"stepping": "cpu_offload", "accum": "x2"}]


def losses_of(choices: list[dict[str, str]]) -> list[Tensor]:
    task = PROBLEMS["transformer"]
    return [torch.stack(train(task, knobs_of(**each), [32, 32, 27]).losses) for each in choices]


def test_shards_are_updated_as_whole_weights_with_one_collective_a_step() -> None:
    (first, second), _ = on_ranks(on_all, [LARS_, LAMB_])
    for knob, (found, num_meetings) in ((LARS_, first), (LAMB_, second)):
        places = [place for place, shape in enumerate(SHAPES) if shape]
        wanted = updated(knob, drawn(0), [drawn(seed) for seed in (1, 2, 3, 4)])
        for place, weight in zip(places, found, strict=True):
            torch.testing.assert_close(weight, wanted[place], rtol=1e-12, atol=1e-12)
        assert num_meetings == 4


@pytest.mark.slow
@pytest.mark.parametrize("option", ["lars", "lamb"])
def test_fsdp_and_every_stepping_train_alike(option: str) -> None:
    choices = [{**each, "optimizer": option} for each in CHOICES]
    wanted, *others = losses_of(choices)
    for found in [*others, *losses_of([{"optimizer": option, "offload": "parameters"}])]:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for ours in on_ranks(losses_of, [{**each, "sharding": "fsdp"} for each in choices]):
        for found in ours:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("option", ["lars", "lamb"])
def test_every_stepping_trains_alike(option: str) -> None:
    wanted, *others = losses_of([{**each, "optimizer": option} for each in CHOICES])
    for found in others:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("model", ["transformer", "resnet"])
@pytest.mark.parametrize(("option", "each"), [("lars", 4), ("lamb", 8)])
def test_bytes_of_states_are_those_of_sgd_and_adamw(option: str, each: int, model: str) -> None:
    rig = assemble(PROBLEMS[model], knobs_of(optimizer=option), CPU)
    step(rig, next(batches(PROBLEMS[model].spec, [4])))
    states = rig.stepper.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
    for parameter in rig.trainable:
        held = sum(value.nbytes for value in states[parameter].values() if isinstance(value, Tensor))
        assert held == each * parameter.numel()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("knob", [LARS(), LAMB()], ids=["lars", "lamb"])
@pytest.mark.parametrize("rounding", [None, Stochastic(), Split(8)], ids=["fp32", "stochastic", "split"])
def test_an_update_needs_a_few_pieces_in_fp32(
    knob: LARS | LAMB, rounding: Stochastic | Split | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a copy of the weight, of 4 MiB in fp32."""
    piece = 2**14
    monkeypatch.setattr(PIECES, piece)
    monkeypatch.setattr("lowvram.core.rounding.NUMEL_AT_A_TIME", piece)
    weight = nn.Parameter(torch.randn(2**10, 2**10).to(torch.bfloat16 if rounding else torch.float32))
    optimizer = knob.make([weight], RoundingPolicy(rounding))
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    with ledger(optimizer=optimizer, inputs=[weight, weight.grad]) as peak:
        optimizer.step()
    assert 4 * piece <= peak.by_kind_max[Kind.OTHER] < 7 * 4 * piece


def test_norms_of_whole_tensors_are_their_own() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.ones(4)]
    assert whole_norms([tensor.norm() for tensor in tensors], tensors).tolist() == [5.0, 2.0]


@pytest.mark.parametrize(
    ("name", "knob", "value"),
    [("trust", LARS, 0.0), ("momentum", LARS, 1.0), ("lr", LARS, 0.0), ("beta2", LAMB, 1.0)],
)
def test_values_out_of_range_are_named(name: str, knob: Callable[..., LARS | LAMB], value: float) -> None:
    with pytest.raises(BadInput, match=rf"optimizer\.{name}={value}"):
        knob(**{name: value})
