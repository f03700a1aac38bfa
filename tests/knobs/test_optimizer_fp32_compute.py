"""Optimizers over weights or states of fewer bits than they compute in."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.rounding import Rounding, Split, Stochastic
from lowvram.knobs.optimizer import SGD, Adafactor, AdamW, AdamW8bit, AdamWCompanded, Moments, SGDCompanded
from lowvram.knobs.optimizer.companded import FORMATS
from lowvram.knobs.optimizer.fp32_compute import FP32ComputeOptimizer, RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import OptimizerKnob
from tests.laboratory import DEVICES


class ToNearest(Rounding):
    def write(self, weight: Tensor, correction: Tensor | None, exact: Tensor) -> None:
        weight.copy_(exact)


NEAREST = RoundingPolicy(ToNearest())  # no noise: what can be compared to the bit
KNOBS = {"adamw": AdamW(), "sgd": SGD(), "adafactor": Adafactor()}


def make_parameters(dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((24, 6), (5,), (), (4, 3, 3, 3))
    values = [torch.randn(shape, generator=draw) for shape in shapes]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = drawn_like(parameter, draw)
        optimizer.step()


def drawn_like(parameter: nn.Parameter, draw: torch.Generator) -> Tensor:
    """Autograd gives a gradient the strides of its parameter, and fused kernels rely on it."""
    return torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=draw)).detach()


def test_what_is_wide_already_is_left_to_torch() -> None:
    weights = make_parameters(torch.float32)
    assert type(AdamW().make(weights, RoundingPolicy(Stochastic()))) is torch.optim.AdamW
    assert type(AdamW().make(make_parameters(), RoundingPolicy())) is torch.optim.AdamW  # nobody asks for rounding
    assert type(AdamW().make(make_parameters(), RoundingPolicy(Stochastic()))) is FP32ComputeOptimizer
    assert type(AdamW(moments=Moments.bf16).make(weights)) is FP32ComputeOptimizer


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", KNOBS)
def test_an_update_is_the_fp32_one_rounded(name: str, device: torch.device) -> None:
    """One step at a time, from the same state."""
    narrow, plain = make_parameters(device=device), make_parameters(torch.float32, device)
    ours, theirs = KNOBS[name].make(narrow, NEAREST), KNOBS[name].make(plain)
    for seed in range(4):
        for weight, wide in zip(narrow, plain, strict=True):
            wide.data.copy_(weight)
        draw = torch.Generator().manual_seed(seed)
        for weight, wide in zip(narrow, plain, strict=True):
            weight.grad = drawn_like(weight, draw)
            wide.grad = weight.grad.float()
        ours.step()
        theirs.step()
        for weight, wide in zip(narrow, plain, strict=True):
            torch.testing.assert_close(weight.float(), wide.detach(), rtol=2.0**-8, atol=1e-6)
            states = {key: value for key, value in theirs.state[wide].items() if value is not None}
            for key, value in states.items():
                torch.testing.assert_close(ours.state[weight][key].reshape(value.shape), value, rtol=1e-6, atol=1e-9)


class Counting(torch.optim.Optimizer):
    """Counts its steps in a number of Python's."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["count"] = self.state[weight].get("count", 0) + 1
                weight.sub_(weight.grad, alpha=group["lr"] / self.state[weight]["count"])


MAKERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD, Counting]


@pytest.mark.parametrize("make", MAKERS)
def test_pieces_make_the_whole(make: Any) -> None:
    results = []
    for piece_elements in (None, 1, 10, 50):
        weights = make_parameters()
        optimizer = with_fp32_compute(make(weights, 0.1), NEAREST, piece_elements=piece_elements)
        steps(optimizer, weights, range(3))
        values = [torch.as_tensor(value) for weight in weights for value in optimizer.state[weight].values()]
        results.append([*weights, *values])
    for other in results[1:]:
        assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(other, results[0], strict=True))


def test_moments_take_half_the_bytes_and_weights_stay_near() -> None:
    ours, theirs = (make_parameters(torch.float32) for _ in range(2))
    narrow, plain = AdamW(moments=Moments.bf16).make(ours), AdamW().make(theirs)
    steps(narrow, ours, range(20))
    steps(plain, theirs, range(20))
    for weight, other in zip(ours, theirs, strict=True):
        state = narrow.state[weight]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)
        assert (state["step"].dtype, float(state["step"])) == (torch.float32, 20.0)
        assert float((weight - other).detach().abs().max()) < 20 * 1e-3 * 2.0**-5  # of the way that 20 steps can go


@pytest.mark.parametrize("noisy", [True, False])
def test_a_second_moment_goes_on_falling(noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With beta2=0.999 it moves by a thousandth a step, a quarter of what bf16 can tell apart: rounded to the nearest
    it would stay for ever."""
    if not noisy:
        monkeypatch.setattr("lowvram.knobs.optimizer.state_formats.stochastically", Tensor.copy_)
    weight = nn.Parameter(torch.ones(2000))
    optimizer = AdamW(beta1=0.0, beta2=0.999, moments=Moments.bf16).make([weight])
    for size in [1.0, *[0.0] * 300]:
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
    found = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    first = float(torch.tensor(0.001).bfloat16())
    assert found == pytest.approx(0.001 * 0.999**300, rel=5e-3) if noisy else found == first


def test_states_keep_their_format_when_they_are_loaded() -> None:
    """torch gives a state the format of its parameter: fp32 moments would be rounded to bf16."""
    weights = make_parameters()
    optimizer = AdamW().make(weights, RoundingPolicy(Stochastic()))
    steps(optimizer, weights, range(3))
    other = AdamW().make(make_parameters(), RoundingPolicy(Stochastic()))
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    moments = [value for state in other.state.values() for name, value in state.items() if name != "step"]
    assert len(moments) == 2 * len(weights)
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert str(other.state_dict()["param_groups"]) == str(optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("knob", [AdamW(), AdamW(moments=Moments.bf16), AdamW8bit()], ids=["fp32", "bf16", "8bit"])
def test_replicas_are_rounded_alike_whatever_else_was_drawn(knob: AdamW | AdamW8bit) -> None:
    """Ranks have generators of their own, but must agree on the weights. And no mask of a dropout changes."""
    found = []
    for seed in (1, 2):
        weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)), *make_parameters()]
        optimizer = knob.make(weights, RoundingPolicy(Stochastic()))
        torch.manual_seed(seed)
        steps(optimizer, weights, range(3))
        found.append(weights)
        drawn = torch.rand(4)
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(seed)), drawn)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_optimizers_of_one_rig_have_noises_of_their_own() -> None:
    weights = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(2)]
    policy = RoundingPolicy(Stochastic())
    for weight in weights:
        steps(AdamW().make([weight], policy), [weight], range(1))
    assert not torch.equal(*weights)


def test_little_is_wide_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.knobs.optimizer.plain.PIECE_ELEMENTS", 2**10)
    weight = nn.Parameter(torch.ones(2**10, 2**6, dtype=torch.bfloat16))
    optimizer = AdamW(moments=Moments.bf16).make([weight], RoundingPolicy(Stochastic()))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with ledger(optimizer=optimizer, inputs=[weight, weight.grad]) as peak:
        optimizer.step()
    assert peak.by_kind_max[Kind.OPTIMIZER] == pytest.approx(2 * weight.nbytes, abs=2 * 512)  # and the counts
    assert 0 < peak.by_kind_max[Kind.OTHER] <= 10 * 4 * 2**10


# Small vectors


def make_vectors(dtype: torch.dtype) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in (5, 64, 128, 192, 64, 7)]


ROUNDED = {"to the nearest": ToNearest(), "24 bits": Split(8), "32 bits": Split(16), "not": None}


@pytest.mark.parametrize("rounding", ROUNDED.values(), ids=ROUNDED)
@pytest.mark.parametrize(
    "knob", [AdamW(), SGD(), AdamWCompanded(), SGDCompanded()], ids=lambda knob: type(knob).__name__
)
def test_vectors_are_updated_at_once_as_one_by_one(knob: OptimizerKnob, rounding: Rounding | None) -> None:
    """Some of them have no gradient in some steps, so that their counts of updates differ."""
    dtype = torch.float32 if rounding is None else torch.bfloat16
    together, alone = make_vectors(dtype), make_vectors(dtype)
    whole = with_fp32(knob, together, rounding)
    each = [with_fp32(knob, [vector], rounding) for vector in alone]
    inner_steps = list[int]()
    whole.inner.register_step_post_hook(lambda *_: inner_steps.append(1))
    for seed, left_out in enumerate((None, 1, None, 4, None)):
        draw = torch.Generator().manual_seed(seed)
        for number, (one, other) in enumerate(zip(together, alone, strict=True)):
            one.grad = None if number == left_out else torch.randn(one.shape, generator=draw).to(dtype)
            other.grad = one.grad
        if seed == 3:
            whole.load_state_dict(deepcopy(whole.state_dict()))
        whole.step()
        for optimizer in each:
            optimizer.step()
    for one, other, optimizer in zip(together, alone, each, strict=True):
        assert torch.equal(one, other)
        assert same_state(whole.state[one], optimizer.state[other])
    assert len(inner_steps) <= 18  # of 28 updates


def with_fp32(knob: OptimizerKnob, vectors: list[nn.Parameter], rounding: Rounding | None) -> FP32ComputeOptimizer:
    plain, formats = (knob.reference(), FORMATS) if isinstance(knob, AdamWCompanded | SGDCompanded) else (knob, {})
    return FP32ComputeOptimizer(plain.make(vectors), RoundingPolicy(rounding), formats, 2**20)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one
    )
