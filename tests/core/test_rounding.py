"""Stochastic rounding: to a neighbour, right on average, with a noise of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowvram.compat.torch_autograd import version_of
from lowvram.core import native
from lowvram.core.device import c_compiler
from lowvram.core.ledger import ledger
from lowvram.core.rounding import CORRECTION, Split, bits_at_random, forget, noise_of, stochastically
from tests.laboratory import CPU, DEVICES


def rounded(exact: Tensor) -> Tensor:
    target = torch.empty_like(exact, dtype=torch.bfloat16)
    stochastically(target, exact)
    return target


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("value", [1.001, -1.001, 3e-3, -1e-30, 2.0**-127])
def test_it_is_one_of_two_neighbours_and_right_on_average(value: float, device: torch.device) -> None:
    torch.manual_seed(0)
    found = rounded(torch.full((100_000,), value, device=device)).double()
    exact = torch.tensor(value)  # in fp32
    toward_zero = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
    away = ((exact.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    assert set(found.unique().tolist()) <= {float(toward_zero), float(away)}
    gap = abs(float(away) - float(toward_zero))
    assert abs(float(found.mean()) - float(exact)) < 5 * 0.5 * gap / len(found) ** 0.5  # five standard deviations


def test_what_bf16_holds_stays() -> None:
    held = torch.randn(10_000).bfloat16()
    assert torch.equal(rounded(held.float()), held)
    assert torch.equal(rounded(held.double()), held)


def test_what_is_no_number_stays_none() -> None:
    of_cuda = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # the nan that CUDA makes, and -nan
    values = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan]), of_cuda]).repeat(1000)
    found = rounded(values).float()
    torch.testing.assert_close(found, values, equal_nan=True, rtol=0, atol=0)


def test_strides_may_differ() -> None:
    exact = torch.randn(8, 6, 5, 5).to(memory_format=torch.channels_last)
    target = torch.empty(8, 6, 5, 5, dtype=torch.bfloat16)
    stochastically(target, exact)
    assert float((target.float() - exact).abs().max()) < 2.0**-6


@pytest.mark.parametrize("shape", [(), (1000, 64), (3, 2**14), (2**16,)])
def test_temporaries_are_as_small_as_some_rows(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.core.rounding.NUMEL_AT_A_TIME", 2**12)
    exact, target = torch.randn(shape), torch.empty(shape, dtype=torch.bfloat16)
    with ledger(inputs=[exact, target]) as peak:
        stochastically(target, exact)
    assert ((target.float() - exact).abs() <= exact.abs() * 2.0**-7).all()
    assert peak.peak_bytes - exact.nbytes - target.nbytes <= 4 * 4 * max(2**12, shape[-1] if len(shape) > 1 else 1)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_noise_belongs_to_its_numbers_and_leaves_the_generator_alone(device: torch.device) -> None:
    def draw(*numbers: int) -> Tensor:
        with noise_of(device, *numbers):
            return torch.rand(8, device=device)

    torch.manual_seed(1)
    plain = torch.rand(8, device=device)
    torch.manual_seed(1)
    first = draw(0, 1)
    assert torch.equal(torch.rand(8, device=device), plain)
    assert torch.equal(draw(0, 1), first)
    assert not torch.equal(draw(1, 0), first)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_bits_of_a_place_are_even_and_independent_of_its_neighbours(device: torch.device) -> None:
    numel = 200_000
    bits = bits_at_random(numel, 12345, device)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**24
    for bit in range(24):
        assert abs(float((bits >> bit & 1).double().mean()) - 0.5) < 5e-3
    shares = bits.double() / 2**24 - 0.5
    for lag in (1, 2, 128):
        assert abs(float((shares[lag:] * shares[:-lag]).mean()) * 12) < 1e-2
    another = bits_at_random(numel, 54321, device).double() / 2**24 - 0.5
    assert abs(float((shares * another).mean()) * 12) < 1e-2


def test_bits_of_a_piece_are_those_of_the_whole() -> None:
    whole = bits_at_random(1000, 7, torch.device("cpu"))
    assert torch.equal(whole[300:], bits_at_random(700, 307, torch.device("cpu")))


# Split


def split(exact: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    rounding = Split(bits)
    weight, correction = exact.bfloat16(), torch.empty_like(exact, dtype=rounding.correction_dtype)
    rounding.write(weight, correction, exact)
    return weight, correction


def restored(weight: Tensor, correction: Tensor, bits: int) -> Tensor:
    exact = weight.float()
    Split(bits).restore(exact, correction)
    return exact


def all_sizes(device: torch.device) -> Tensor:
    """Random bits: numbers of every exponent, among them subnormal ones."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=draw).to(device, torch.int32)
    values = bits.view(torch.float32)
    return values[values.abs() < torch.finfo(torch.bfloat16).max]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_with_16_bits_nothing_is_lost(device: torch.device) -> None:
    exact = all_sizes(device)
    assert torch.equal(restored(*split(exact, 16), 16), exact)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_with_8_bits_the_error_is_at_most_half_the_last_of_24_bits(device: torch.device) -> None:
    """Of 24 bits, 15 are behind the point. Subnormal numbers have a fixed distance instead of a relative one."""
    exact = all_sizes(device)
    found = restored(*split(exact, 8), 8)
    distance = torch.maximum(exact.abs(), torch.tensor(torch.finfo(torch.float32).tiny, device=device)).double()
    assert float(((found.double() - exact.double()).abs() / distance).max()) <= 2.0**-16
    assert torch.equal(restored(*split(found, 8), 8), found)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_weight_of_a_split_is_the_nearest_of_bf16(bits: int) -> None:
    """Up to the first rounding to 24 bits."""
    exact = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    weight, _ = split(exact, bits)
    distance = (exact.bfloat16().float() - exact).abs()
    assert float(((weight.float() - exact).abs() - distance).max()) <= (2.0**-16 * 4 if bits == 8 else 0.0)


@pytest.mark.parametrize("bits", [8, 16])
def test_what_a_split_cannot_hold_stays_what_it_is(bits: int) -> None:
    of_cuda = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]), of_cuda])
    weight, correction = split(values, bits)
    torch.testing.assert_close(restored(weight, correction, bits), values, equal_nan=True, rtol=0, atol=0)
    assert int(correction.abs().max()) == 0


def test_a_correction_outlives_the_rest_of_a_state() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    states = {one: {CORRECTION: torch.ones(1), "exp_avg": torch.ones(1)}, other: {"exp_avg": torch.ones(1)}}
    for parameter in (one, other, torch.zeros(1)):
        forget(states, parameter)
    assert states == {one: {CORRECTION: torch.ones(1)}}


def test_autograd_knows_what_was_written() -> None:
    weight, correction = torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int8)
    before = version_of(weight), version_of(correction)
    Split(8).write(weight.detach(), correction, torch.randn(9))
    assert version_of(weight) > before[0]
    assert version_of(correction) > before[1]
    before = version_of(weight)
    stochastically(weight[2:], torch.randn(7))
    assert version_of(weight) > before


@pytest.mark.skipif(c_compiler() is None, reason="needs a C compiler")
def test_in_c_the_bits_are_those_of_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.cat([all_sizes(CPU), torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])])
    results = list[list[Tensor]]()
    for run in (native.run, lambda *_: False):
        monkeypatch.setattr(native, "run", run)
        torch.manual_seed(0)
        found = [rounded(exact)]
        for bits in (8, 16):
            weight, correction = split(exact, bits)
            found += [weight, correction, restored(weight, correction, bits)]
        results.append(found)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
