"""Adafactor, whose update goes over the rows of a parameter in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.rounding import Split, Stochastic
from lowvram.knobs.optimizer import Adafactor, decayed
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy

PIECES = "lowvram.knobs.optimizer.adafactor.PIECE_ELEMENTS"
SHAPES = ((240, 96), (65, 3), (700,), (), (8, 3, 5, 5), (0, 4))


def drawn(seed: int, dtype: torch.dtype) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        yield torch.randn(shape, generator=draw).to(dtype)


def updated(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for seed in range(1, 1 + num_steps):
        for weight, gradient in zip(weights, drawn(seed, weights[0].dtype), strict=True):
            weight.grad = gradient * 10.0**-seed  # so that each of torch's lower bounds counts at some step
        optimizer.step()


@pytest.mark.parametrize("piece_elements", [2**21, 64, 1000])
def test_updates_are_those_of_torch_in_pieces_of_any_size(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIECES, piece_elements)
    ours, theirs = ([nn.Parameter(value) for value in drawn(0, torch.float64)] for _ in range(2))
    optimizer = Adafactor(0.02, -0.7, 1.5, 0.2).make(ours)
    filled = theirs[:-1]  # torch divides by the number of elements
    plain = torch.optim.Adafactor(decayed(filled, 0.2), 0.02, -0.7, d=1.5)
    updated(ours, optimizer, 8)
    updated(theirs, plain, 8)
    for weight, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=1e-12)
    for weight, other in zip(ours, filled, strict=False):
        for name in ("row_var", "col_var", "variance"):
            if (wanted := plain.state[other].get(name)) is not None:
                torch.testing.assert_close(optimizer.state[weight][name], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rounding", [Stochastic(), Split(8)], ids=["stochastic", "split"])
def test_an_update_needs_a_few_pieces_in_fp32(rounding: Stochastic | Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a copy of the weight, of 4 MiB in fp32."""
    piece = 2**14
    monkeypatch.setattr(PIECES, piece)
    monkeypatch.setattr("lowvram.core.rounding.NUMEL_AT_A_TIME", piece)
    weight = nn.Parameter(torch.randn(2**10, 2**10).bfloat16())
    optimizer = Adafactor().make([weight], RoundingPolicy(rounding))
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    with ledger(optimizer=optimizer, inputs=[weight, weight.grad]) as peak:
        optimizer.step()
    other = peak.by_kind_max[Kind.OTHER]
    assert 2 * 4 * piece < other < 6 * 4 * piece
