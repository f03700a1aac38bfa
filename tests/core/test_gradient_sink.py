"""Gradients added to the sums of a step row by row: the same numbers, and no whole gradient in memory."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.core.stepper import GradientSink, SinkOf, Stepper, no_sink
from lowvram.knobs.logits import LazyLogits, TiledLogits
from lowvram.knobs.optimizer import SGD
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, InBackward, InBackwardStepper, SumsIn, device_sums, in_backward
from lowvram.knobs.stepping.device_sums import DeviceSums
from lowvram.knobs.stepping.totals import ALIGNED_NUMEL, Bf16, Total, flat
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)

SPEC = replace(TOKENS, num_classes=509)
TILED = TiledLogits(chunk_tokens=5)  # of the 32 targets of a part
LONG: dict[str, str | Knob] = {"accum": "x2", "logits": TiledLogits(4), "optimizer": "sgd"}
BANDS = {SumsIn.bf16: 4e-3, SumsIn.int8: 2e-2}
EACH = pytest.mark.parametrize("sums", BANDS, ids=lambda sums: sums.name)


def own(width: int = 24, tied: bool = True, num_classes: int = 509) -> Problem:
    config = replace(TRANSFORMER, num_layers=2, width=width, tied_embeddings=tied)
    return Auto().pose(config, replace(SPEC, num_classes=num_classes))


def gpt2() -> Problem:
    return Auto().pose(HfConfig(name=tiny("gpt2")), replace(SPEC, num_classes=300))


MODELS = {
    "tied": partial(own),
    "untied": partial(own, tied=False),
    "width of whole blocks": partial(own, width=128),
    "odd width": partial(own, width=20),
    "of transformers": gpt2,
}


@final
class Exact(Total):
    """Sums in fp64, which note where each addition began."""

    starts: list[int] = []  # noqa: RUF012

    def __init__(self, numel: int, device: torch.device) -> None:
        self.sums = torch.zeros(numel, dtype=torch.float64, device=device)

    def add(self, values: Tensor, seed: int, start: int = 0) -> None:
        self.starts.append(start)
        self.sums[start : start + values.numel()] += flat(values)

    def read(self, start: int, end: int) -> Tensor:
        return self.sums[start:end]

    def add_to(self, gradient: Tensor) -> None:
        gradient += self.sums


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where additions to sums began; stepping.sums=bf16 is exact."""
    monkeypatch.setattr(in_backward, "Bf16", Exact)
    monkeypatch.setattr(device_sums, "Fp32", lambda zeros: Exact(len(zeros), zeros.device))
    monkeypatch.setattr(in_backward, "SMALL_NUMEL", -1)  # no gradient waits
    monkeypatch.setattr(Exact, "starts", [])
    return Exact.starts


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_sums_are_those_of_whole_gradients(make: partial[Problem], clip: float | None, starts: list[int]) -> None:
    found, wanted = (
        train(InDouble(make()), knobs_of(stepping=knob, accum="x4", optimizer="sgd", logits=TILED), [16, 13], lr=0.01)
        for knob in (InBackward(clip, sums=SumsIn.bf16), AfterBackward(clip))
    )
    assert relative_error(found.gradients, wanted.gradients) <= 1e-12
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12
    inside = [start for start in starts if start]
    assert len(inside) >= 4 * 2  # several tiles in each part, in both steps
    assert all(start % ALIGNED_NUMEL == 0 for start in inside)


@EACH
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("tied", [True, False])
def test_in_few_bits_they_are_off_by_no_more(sums: SumsIn, clip: float | None, tied: bool) -> None:
    found, wanted = (
        train(own(64, tied), knobs_of(stepping=knob, accum="x4", optimizer="sgd", logits=TILED), [16], lr=0.01)
        for knob in (InBackward(clip, sums=sums), AfterBackward(clip))
    )
    assert 0 < relative_error(found.gradients, wanted.gradients) <= BANDS[sums]
    torch.testing.assert_close(found.updates[0].grad_norm, wanted.updates[0].grad_norm, rtol=BANDS[sums], atol=0)


def test_rounding_is_right_on_average() -> None:
    weight, sums = nn.Parameter(torch.zeros(100, 24)), DeviceSums(Bf16)
    exact, total = torch.randn(100, 24, generator=torch.Generator().manual_seed(1)), torch.zeros(100, 24)
    for _ in range(500):
        sums.begin(2)
        for _ in range(2):  # the last layer's, then the embedding's
            sink = sums.sink_of(weight)
            assert sink is not None
            for first in range(0, 100, 64):
                sink.add(slice(first, min(first + 64, 100)), exact[first : first + 64])
        sums.bring_back(weight)
        assert weight.grad is not None
        total += weight.grad
    assert relative_error({"": weight.grad}, {"": 2 * exact}) > 1e-3  # pyright: ignore[reportArgumentType]
    assert relative_error({"": total / 500}, {"": 2 * exact}) < 3e-4


@EACH
def test_a_saved_state_continues_to_the_bit(sums: SumsIn) -> None:
    problem, knobs = own(), knobs_of(stepping=InBackward(sums=sums), accum="x4", logits=TILED)
    whole, other = (assemble(problem, knobs, CPU) for _ in range(2))
    batch = make_batch(problem.spec, 16)
    step(whole, batch)
    other.model.load_state_dict(whole.model.state_dict())
    other.stepper.load_state_dict(deepcopy(whole.stepper.state_dict()))
    for rig in (whole, other):
        step(rig, batch)
    assert relative_error(dict(whole.model.named_parameters()), dict(other.model.named_parameters())) == 0


@pytest.mark.sampled(2)
@EACH
@pytest.mark.parametrize("init_scale", [65536.0, 2.0**31])
def test_fp16_skips_the_same_steps(sums: SumsIn, init_scale: float) -> None:
    found, wanted = (
        train(own(), knobs_of(logits=TILED, precision=Fp16(init_scale), stepping=knob, accum="x4"), [16] * 3)
        for knob in (InBackward(sums=sums), AfterBackward())
    )
    assert [update.applied for update in found.updates] == [update.applied for update in wanted.updates]
    torch.testing.assert_close(found.losses, wanted.losses, rtol=5e-3, atol=0)


# Memory


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sums", "clip", "tied"), [(SumsIn.int8, 0.3, True), (SumsIn.int8, None, False), (SumsIn.bf16, None, True)]
)
def test_only_a_tile_of_the_gradient_is_in_memory(
    sums: SumsIn, clip: float | None, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is where all activations are alive and the whole gradient used to be, too."""
    problem, knobs = long_texts(tied), knobs_of(stepping=InBackward(clip, sums=sums), **LONG)
    found = peak_as_measured(problem, knobs, 4)
    monkeypatch.setattr(DeviceSums, "sink_of", lambda self, parameter: None)
    assert found.peak_bytes <= peak_as_measured(problem, knobs, 4).peak_bytes - 0.8 * 2003 * 32 * 4


def long_texts(tied: bool) -> Problem:
    config = replace(TRANSFORMER, num_layers=1, width=32, context=128, tied_embeddings=tied)
    return Auto().pose(config, replace(TOKENS, num_classes=2003, shape=(128,)))


def test_the_memory_is_as_planned() -> None:
    knobs = knobs_of(stepping=InBackward(0.3, sums=SumsIn.int8), accum="x2", logits=TILED)
    assert peak_as_planned(own(), knobs, 8).by_kind_max == peak_as_measured(own(), knobs, 8).by_kind_max


# Odd cases, with a stepper alone


class Model(nn.Module):
    """Its embedding is looked up without a layer for that; the last layer has a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(24, 509)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.head.weight).tanh()

    def loss(self, sink_of: SinkOf, seed: int) -> Tensor:
        tokens = torch.randint(509, (30,), generator=torch.Generator().manual_seed(seed))
        logits = LazyLogits(self(tokens), self.head, 7, None, False, sink_of)
        return logits.cross_entropy(tokens.roll(1)) / 30


def stepper_of(model: nn.Module, sums: SumsIn = SumsIn.bf16) -> InBackwardStepper:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return InBackwardStepper(parameters, SGD(lr=1.0, momentum=0).make, sums.room_for(parameters), None, InBackward.norm)


def test_what_autograd_accumulates_is_added_to_what_went_into_the_sink(starts: list[int]) -> None:
    model, plain = Model().double(), Model().double()
    stepper, before = stepper_of(model), deepcopy(model)
    stepper.begin(3)
    for seed in range(3):
        stepper.backward(model.loss(stepper.sink_of, seed))
        plain.loss(no_sink, seed).backward()
    assert stepper.update().applied
    for name, parameter in plain.named_parameters():
        found = before.get_parameter(name) - model.get_parameter(name)
        assert parameter.grad is not None
        assert relative_error({name: found}, {name: parameter.grad}) <= 1e-12
    assert any(starts)


def test_a_frozen_weight_gets_no_gradient(starts: list[int]) -> None:
    model = Model()
    model.head.weight.requires_grad_(False)
    stepper = stepper_of(model)
    stepper.begin(2)
    for seed in range(2):
        stepper.backward(model.loss(stepper.sink_of, seed))
    assert stepper.update().applied
    assert not any(starts)


def test_a_weight_that_is_computed_from_parameters_has_no_sink(starts: list[int]) -> None:
    model = Model()
    weight_norm(model.head)
    stepper = stepper_of(model)
    stepper.begin(2)
    for seed in range(2):
        stepper.backward(model.loss(stepper.sink_of, seed))
    assert stepper.update().applied
    assert starts
    assert not any(starts)


def sink_of(stepper: Stepper, parameter: Tensor) -> GradientSink | None:
    """What is offered in a backward pass."""
    offered: list[Any] = []
    loss = nn.Parameter(torch.ones(())) * 1.0
    loss.register_hook(lambda gradient: offered.append(stepper.sink_of(parameter)))
    stepper.backward(loss)
    return offered[0]


def test_one_part_and_others_parameters_get_none() -> None:
    model = nn.Linear(3, 2)
    stepper = stepper_of(model)
    stepper.begin(2)
    assert isinstance(sink_of(stepper, model.weight), GradientSink)
    assert sink_of(stepper, nn.Parameter(torch.ones(2, 3))) is None
    assert sink_of(stepper, model.weight + 0) is None
    stepper.begin(1)
    assert sink_of(stepper, model.weight) is None


def test_sums_on_the_host_take_whole_gradients() -> None:
    model = nn.Linear(3, 2)
    stepper = stepper_of(model, SumsIn.host)
    stepper.begin(2)
    assert sink_of(stepper, model.weight) is None
