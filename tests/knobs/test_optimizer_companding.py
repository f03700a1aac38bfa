"""Codes of 8 bits: how far they are from what they stand for, on average and at most."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lowvram.core import native
from lowvram.core.device import c_compiler
from lowvram.knobs.optimizer import companding
from lowvram.knobs.optimizer.companding import (
    BLOCK_NUMEL,
    COMPANDERS,
    IN_C,
    Companded,
    Compander,
    Root,
    Softsign,
    from_codes,
    to_codes,
    write_companded,
)
from lowvram.knobs.optimizer.state_formats import SCALES, Kept, Piece
from tests.laboratory import COMPILING_DEVICES, CPU

EACH = pytest.mark.parametrize("compander", [Softsign, Root])


def drawn(compander: type[Compander], numel: int, seed: int = 0) -> Tensor:
    """Values of very different sizes, within a block too; those for `Root` aren't negative."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=draw) * torch.randn(numel, generator=draw).exp() * 1e-6
    return values.square() if compander is Root else values


def whole(values: Tensor) -> Piece:
    return Piece(None, slice(0, values.numel()))


def packed(compander: type[Compander], values: Tensor, seed: int = 0) -> Kept:
    format = Companded(compander)
    kept = format.new("state", values, torch.float32, values.device)
    format.write(kept, "state", whole(values), values, seed)
    return kept


def unpacked(compander: type[Compander], kept: Kept, like: Tensor) -> Tensor:
    return Companded(compander).read(kept, "state", whole(like), like)


def largest_of_block(values: Tensor) -> Tensor:
    """(numel,): the largest size in each value's block."""
    blocks = values.abs().split(BLOCK_NUMEL)
    return torch.cat([block.max().expand(len(block)) for block in blocks])


@pytest.mark.parametrize("device", COMPILING_DEVICES, ids=str)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
def test_a_mean_is_within_the_distance_of_two_codes(numel: int, device: torch.device) -> None:
    """A 64th of the block's largest value at that value, a 253rd at zero: the slope of x / (2 - |x|), times 1 / 127."""
    values = drawn(Softsign, numel).to(device)
    found = unpacked(Softsign, packed(Softsign, values), values)
    largest = largest_of_block(values)
    shares = values / largest
    distance = (1 + shares.abs() + 1 / 64).square() / (2 * 127)
    assert float(((found - values).abs() / (distance * largest)).max()) <= 1
    assert torch.equal(found[values.abs() == largest], values[values.abs() == largest])


@pytest.mark.parametrize("device", COMPILING_DEVICES, ids=str)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
def test_the_root_of_a_square_is_within_a_256th_of_the_largest(numel: int, device: torch.device) -> None:
    values = drawn(Root, numel).to(device)
    found = unpacked(Root, packed(Root, values), values)
    errors = (found.sqrt() - values.sqrt()).abs() / largest_of_block(values).sqrt()
    assert float(errors.max()) <= 1.001 / 256
    assert float((found / largest_of_block(values)).min()) >= 0.999 / 256**2


def test_no_code_of_a_square_is_zero_beside_others_that_are_not() -> None:
    """An update is divided by its root."""
    values = torch.tensor([1.0, 1e-9, 0.0])
    found = unpacked(Root, packed(Root, values), values)
    assert found.tolist() == [1.0, 256.0**-2, 256.0**-2]


@EACH
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_any_scale_is_held(compander: type[Compander], scale: float) -> None:
    values = torch.linspace(0, 1, 100) * scale
    torch.testing.assert_close(
        unpacked(compander, packed(compander, values), values), values, rtol=0, atol=scale * 2.1 / 100
    )


@EACH
def test_it_is_right_on_average(compander: type[Compander]) -> None:
    """The value itself, not its place among the codes: an average that is added to often must not drift. Of squares,
    those that no code reaches are left out."""
    values = drawn(compander, 512)
    draws = torch.stack([unpacked(compander, packed(compander, values, seed * 1000), values) for seed in range(1000)])
    is_reached = values.abs() > (1 if compander is Root else 0) * largest_of_block(values) / 256**2
    error, error_of_mean = ((found - values)[is_reached].norm() for found in (draws[0], draws.mean(0)))
    assert float(error) > 0
    assert float(error_of_mean) < 3 * float(error) / math.sqrt(1000)


@EACH
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_harms_no_other_block(compander: type[Compander], bad: float) -> None:
    values = torch.ones(2 * BLOCK_NUMEL)
    values[3] = bad
    found = unpacked(compander, packed(compander, values), values)
    assert not found[:BLOCK_NUMEL].isfinite().all()
    assert torch.equal(found[BLOCK_NUMEL:], torch.ones(BLOCK_NUMEL))


@EACH
def test_codes_stand_where_they_are_placed(compander: type[Compander]) -> None:
    which = COMPANDERS[compander.dtype]
    codes = torch.arange(which.least, which.most + 1, dtype=torch.float64)
    shares = which.share(codes)
    torch.testing.assert_close(which.place(shares), codes, rtol=0, atol=1e-9)
    assert (shares.diff() > 0).all()
    assert float(shares[-1]) == 1
    assert float(shares[0]) == (-1 if compander is Softsign else 256.0**-2)


@EACH
def test_pieces_are_the_whole(compander: type[Compander], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an operator, and rows that a caller writes one after the other."""
    values = drawn(compander, 100 * 64).view(100, 64)
    wanted = packed(compander, values, 5)
    monkeypatch.setattr(companding, "PIECE_NUMEL", 2 * BLOCK_NUMEL)
    format, kept = Companded(compander), packed(compander, values, 5)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=0)
    for start, end in ((0, 30), (30, 100)):
        piece = Piece(slice(start, end), slice(start * 64, end * 64))
        format.write(kept, "state", piece, values[start:end], 5 + start * 64)
        found = format.read(kept, "state", piece, values[start:end])
        assert torch.equal(found, unpacked(compander, wanted, values)[start:end])
    torch.testing.assert_close(kept, wanted, rtol=0, atol=0)


@EACH
def test_a_layout_of_memory_changes_nothing(compander: type[Compander]) -> None:
    values = drawn(compander, 8 * 6 * 3 * 3).view(8, 6, 3, 3)
    last = values.to(memory_format=torch.channels_last)
    torch.testing.assert_close(packed(compander, last), packed(compander, values), rtol=0, atol=0)
    found = unpacked(compander, packed(compander, values), last)
    assert found.stride() == last.stride()
    assert torch.equal(found, unpacked(compander, packed(compander, values), values))


@EACH
def test_it_takes_a_byte_each_and_four_for_a_block(compander: type[Compander]) -> None:
    kept = packed(compander, drawn(compander, 1000))
    assert {name: value.nbytes for name, value in kept.items()} == {"state": 1000, "state" + SCALES: 16 * 4}


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("numel", [1000, 70_000])
def test_a_compiled_kernel_computes_the_same(compander: type[Compander], numel: int) -> None:
    """To the bit, but for a code in ten thousand: a compiler may join a product and a sum into one operation."""
    values, wanted = drawn(compander, numel), packed(compander, drawn(compander, numel), 7)
    found = Companded(compander).new("state", values, torch.float32, CPU)
    torch.compile(to_codes, dynamic=True)(found["state"], found["state" + SCALES], values, 7)
    assert torch.equal(found["state" + SCALES], wanted["state" + SCALES])
    assert int((found["state"] != wanted["state"]).sum()) <= numel / 10_000
    read = torch.empty(numel)
    torch.compile(from_codes, dynamic=True)(read, wanted["state"], wanted["state" + SCALES])
    torch.testing.assert_close(read, unpacked(compander, wanted, values), rtol=1e-6, atol=0)


@pytest.mark.skipif(c_compiler() is None, reason="needs a C compiler")
@EACH
def test_the_code_in_c_computes_the_same_bits(compander: type[Compander]) -> None:
    for numel, special in product([1, 63, 64, 65, 1000], [0.5, 0.0, 1e-42, torch.inf, torch.nan]):
        values = drawn(compander, numel)
        values[numel // 2] = special
        wanted, found = (
            (torch.zeros(numel, dtype=compander.dtype), torch.zeros(-(-numel // BLOCK_NUMEL)), torch.empty(numel))
            for _ in range(2)
        )
        to_codes(*wanted[:2], values, 5)
        from_codes(wanted[2], *wanted[:2])
        assert native.run(IN_C, f"{compander.name}_to_codes", *found[:2], values, numel, 5)
        assert native.run(IN_C, f"{compander.name}_from_codes", found[2], *found[:2], numel)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_without_a_compiler_the_codes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(200_000)  # more than a piece
    codes, scales = torch.zeros(len(values), dtype=torch.int8), torch.zeros(len(values) // BLOCK_NUMEL)
    write_companded(codes, scales, values, 7)
    others = torch.zeros_like(codes), torch.zeros_like(scales)
    monkeypatch.setattr(native, "run", lambda *_: False)
    write_companded(*others, values, 7)
    assert torch.equal(codes, others[0])
    assert torch.equal(scales, others[1])
