"""stepping.sums=bf16 and int8: how exact sums in few bits are, how many bytes they take, and that a step is a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, InBackward, InBackwardStepper, SumsIn
from lowvram.knobs.stepping.device_sums import DeviceSums
from lowvram.knobs.stepping.totals import BLOCK_NUMEL, PIECE_NUMEL, Bf16, Fp32, Int8, Total, to_bf16, to_int8
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    RESNET,
    TOKENS,
    TRANSFORMER,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
    train,
)

WIDE = {
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=4, width=64), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16, layers=[2, 2]), IMAGES),
}
MakeRoom = Callable[[int, torch.device], Total]
ON_DEVICE = (SumsIn.bf16, SumsIn.int8)
EACH = pytest.mark.parametrize("sums", ON_DEVICE, ids=lambda sums: sums.name)
BYTES_PER_NUMBER = {SumsIn.bf16: 2, SumsIn.int8: 1 + 4 / BLOCK_NUMEL}
BAND = {SumsIn.bf16: 4e-3, SumsIn.int8: 2e-2}  # of a sum of four gradients


@EACH
@pytest.mark.parametrize("problem", WIDE)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradients_are_those_of_a_plain_loop_up_to_few_bits(sums: SumsIn, problem: str, clip: float | None) -> None:
    found, wanted = (
        train(WIDE[problem], knobs_of(stepping=knob, accum="x4", optimizer="sgd"), [16], lr=0.01)
        for knob in (InBackward(clip, sums=sums), AfterBackward(clip))
    )
    assert 0 < relative_error(found.gradients, wanted.gradients) <= BAND[sums]
    torch.testing.assert_close(found.updates[0].grad_norm, wanted.updates[0].grad_norm, rtol=BAND[sums], atol=0)


@pytest.mark.sampled(2)
@EACH
@pytest.mark.parametrize("problem", WIDE)
def test_they_take_few_bytes_and_nothing_goes_to_the_host(sums: SumsIn, problem: str) -> None:
    knobs = knobs_of(stepping=InBackward(sums=sums), accum="x4")
    rig = assemble(WIDE[problem], knobs, CPU)
    numels = [parameter.numel() for parameter in rig.trainable]
    batch, before = make_batch(WIDE[problem].spec, 16), replace(host.traffic)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    rounded_up = 2 * 512 * len(numels)  # each tensor of the sums, as an allocator rounds it
    most = BYTES_PER_NUMBER[sums] * sum(numels) + rounded_up + 4 * 2 * max(numels)
    assert BYTES_PER_NUMBER[sums] * sum(numels) <= peak.by_kind_max[Kind.GRADIENTS] <= most
    assert peak.by_kind_max[Kind.HOST] == 0
    assert host.traffic == before
    assert peak_as_planned(WIDE[problem], knobs, 16).by_kind_max == peak.by_kind_max


@pytest.mark.parametrize("make", [Bf16, Int8])
def test_rounding_is_right_on_average(make: MakeRoom) -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1)).mul_(1e-6)
    draws = []
    for draw in range(2000):
        kept = make(1000, CPU)
        kept.add(exact, 1000 * draw)
        draws.append(kept.read(0, 1000))
    error, error_of_mean = (float((found - exact).norm() / exact.norm()) for found in (draws[0], sum(draws) / 2000))
    assert 1e-3 < error < 1e-2
    assert error_of_mean < 3 * error / math.sqrt(2000)


@pytest.mark.parametrize("make", [Bf16, Int8])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(make: MakeRoom, bad: float) -> None:
    kept, values = make(130, CPU), torch.ones(130)
    values[3] = bad
    kept.add(values, 1)
    assert not kept.read(0, 130).isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_int8_holds_any_scale(scale: float) -> None:
    kept, values = Int8(100, CPU), torch.linspace(-1, 1, 100) * scale
    kept.add(values, 1)
    torch.testing.assert_close(kept.read(0, 100), values, rtol=0, atol=scale / 100)


@pytest.mark.parametrize("make", [Bf16, Int8, lambda numel, device: Fp32(torch.zeros(numel, device=device))])
def test_values_are_added_in_their_order_in_memory(make: MakeRoom) -> None:
    """Whatever their shape and layout, as those of convolutions over channels_last images."""
    in_memory = torch.arange(24.0)
    kept = make(24, CPU)
    kept.add(in_memory.view(2, 3, 4).permute(2, 0, 1), 1)
    torch.testing.assert_close(kept.read(0, 24), in_memory, rtol=0, atol=0.3)


def test_a_number_is_summed_beside_vectors() -> None:
    """Such as a temperature that is learnt: each has no dimension more than a vector."""
    parameters = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3))]
    sums = DeviceSums(Int8)
    sums.begin(3)
    for part in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 10.0**part)
        if part < 2:
            sums.take(parameters)
    sums.add_to(parameters)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 111.0))


class Forked(nn.Module):
    """A parameter larger than a piece, a convolution in channels_last, and a weight that only the first part uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.large = nn.Parameter(torch.randn(1, PIECE_NUMEL + 100))
        self.early = nn.Parameter(torch.randn(7))

    def forward(self, seed: int, is_first: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(2, 3, 8, 8, generator=generator)
        loss = self.conv(images).square().sum()
        loss = loss + (self.large * torch.randn(self.large.shape, generator=generator)).sum()
        return loss + (seed + 1) * self.early.square().sum() if is_first else loss


def gradients_seen(sums: SumsIn, divisor: Tensor | float = 1.0) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """The change of each weight by one step of SGD with rate 1 in three parts, the wanted one, and the update."""
    model, plain = Forked(), Forked()
    parameters = list(model.parameters())
    stepper = InBackwardStepper(
        parameters, SGD(lr=1.0, momentum=0).make, sums.room_for(parameters), None, InBackward.norm
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stepper.begin(3, divisor)
    for seed in range(3):
        stepper.backward(model(seed, seed == 0) * float(divisor))
        plain(seed, seed == 0).backward()
    update = stepper.update()
    found = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    return found, wanted, update


@EACH
@pytest.mark.parametrize("divisor", [1.0, torch.tensor(64.0)], ids=["plain", "scaled"])
def test_odd_parameters(sums: SumsIn, divisor: Tensor | float) -> None:
    found, wanted, update = gradients_seen(sums, divisor)
    assert update.applied
    for name, gradient in wanted.items():
        assert relative_error({name: found[name]}, {name: gradient}) <= BAND[sums], name


@EACH
def test_with_a_loss_scale_a_bad_gradient_changes_nothing(sums: SumsIn) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    parameters = list(model.parameters())
    stepper = InBackwardStepper(parameters, SGD().make, sums.room_for(parameters), None, InBackward.norm)
    stepper.begin(2, torch.tensor(2.0))
    for scale in (1.0, math.inf):
        stepper.backward(model(torch.ones(1, 3)).sum() * scale)
    assert not stepper.update().applied
    assert torch.equal(model.weight, before)


PARTS = [[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 2], [2], [0, 1, 2, 3], [4, 5], [4, 5]]  # vectors that have a gradient


@pytest.mark.parametrize("num_parts", range(1, len(PARTS) + 1))
def test_vectors_are_summed_in_fp32_whichever_a_part_reaches(num_parts: int) -> None:
    vectors = [nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)) for _ in range(6)]
    sums, wanted = DeviceSums(Int8), [torch.zeros(5) for _ in vectors]
    for step_number in range(2):
        sums.begin(num_parts)
        for part, numbers in enumerate(PARTS[:num_parts]):
            for number in numbers:
                gradient = torch.full((5,), 1 + 2.0**-7 * (number + part), dtype=torch.bfloat16)
                vectors[number].grad = gradient
                wanted[number] += (step_number == 0) * gradient
            sums.take([vectors[number] for number in numbers])
        assert set(sums.with_gradient()) == {vectors[number] for numbers in PARTS[:num_parts] for number in numbers}
        for vector in sums.with_gradient():
            sums.bring_back(vector)
    for vector, total in zip(vectors, wanted, strict=True):
        assert torch.equal(torch.zeros(5) if vector.grad is None else vector.grad.float(), total.bfloat16().float())


@pytest.mark.parametrize("make", [Bf16, Int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 127, 128, 300, 512])
def test_a_gradient_with_its_sum_is_rounded_once(make: MakeRoom, dtype: torch.dtype, numel: int) -> None:
    draw = torch.Generator().manual_seed(numel)
    kept, gradient = make(numel, CPU), torch.randn(numel, generator=draw).to(dtype)
    kept.add(torch.randn(numel, generator=draw), 1)
    wanted = (gradient.float() + kept.read(0, numel)).to(dtype)
    kept.add_to(gradient)
    torch.testing.assert_close(gradient, wanted, rtol=0 if dtype is torch.bfloat16 else 1e-6, atol=1e-7)


def test_no_two_additions_round_alike() -> None:
    sums, weights = DeviceSums(Int8), [nn.Parameter(torch.zeros(1000, 1)) for _ in range(2)]
    sums.begin(1)
    for weight in weights:
        weight.grad = torch.linspace(0, 1, 1000)[:, None]
        sums.take([weight])
        sums.bring_back(weight)
    one, other = (weight.grad for weight in weights)
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)


@EACH
def test_a_saved_state_continues_to_the_bit(sums: SumsIn) -> None:
    problem, knobs = PROBLEMS["transformer"], knobs_of(stepping=InBackward(sums=sums), accum="x4")
    whole, other = (assemble(problem, knobs, CPU) for _ in range(2))
    batch = make_batch(problem.spec, 8)
    step(whole, batch)
    other.model.load_state_dict(whole.model.state_dict())
    other.stepper.load_state_dict(deepcopy(whole.stepper.state_dict()))
    for rig in (whole, other):
        step(rig, batch)
    assert relative_error(dict(whole.model.named_parameters()), dict(other.model.named_parameters())) == 0


@EACH
def test_with_the_loss_scale_of_fp16_and_weights_in_bf16(sums: SumsIn) -> None:
    for choices in ({"precision": Fp16(2.0**12)}, {"precision": "bf16_pure"}):
        found, wanted = (
            train(PROBLEMS["resnet"], knobs_of(optimizer="sgd", stepping=knob, accum="x4", **choices), [8], lr=0.01)
            for knob in (InBackward(sums=sums), InBackward())
        )
        assert relative_error(found.gradients, wanted.gradients) <= BAND[sums] + 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1000, 70_000])
def test_a_compiled_kernel_computes_the_same_to_the_bit(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    (one, other), compiled = (Bf16(numel, CPU) for _ in range(2)), torch.compile(to_bf16, dynamic=True)
    for seed in range(3):
        one.add(values, seed)
        compiled(other.sums, values, seed)
    assert torch.equal(one.sums, other.sums)
    (one, other), compiled = (Int8(numel, CPU) for _ in range(2)), torch.compile(to_int8, dynamic=True)
    for seed in range(3):
        one.add(values, seed)
        compiled(other.codes_bk, other.scales_b, values, seed)
    assert torch.equal(one.codes_bk, other.codes_bk)
    assert torch.equal(one.scales_b, other.scales_b)


def test_a_row_says_so() -> None:
    model = nn.Linear(1, 1)
    assert "summed in int8" in str(InBackward(sums=SumsIn.int8).caveat(model))
    assert InBackward().caveat(model) is None
