"""Exactly so many elements, by their values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lowvram.compress.sparsity import selection
from lowvram.compress.sparsity.selection import Piece, ascending, choose_lowest, descending, rows_of


def lowest(tensors: list[Tensor], num: int) -> Tensor:
    """Which elements of all tensors, one after another, are chosen."""
    chosen = [torch.empty_like(tensor, dtype=torch.bool) for tensor in tensors]
    pieces = [
        Piece(partial(ascending, values), rows)
        for tensor, result in zip(tensors, chosen, strict=True)
        for values, rows in rows_of(tensor, result)
    ]
    choose_lowest(pieces, num)
    return torch.cat([result.flatten() for result in chosen])


def sorted_lowest(tensors: list[Tensor], num: int) -> Tensor:
    values = torch.cat([tensor.flatten() for tensor in tensors])
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[values.argsort(stable=True)[:num]] = True
    return chosen


@pytest.mark.parametrize("piece_numel", [1, 12, 2**20])
@pytest.mark.parametrize("num", [0, 1, 50, 131, 180])
def test_the_lowest_of_all_tensors_are_chosen_and_of_equal_ones_the_first(
    num: int, piece_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PIECE_NUMEL", piece_numel)
    draw = torch.Generator().manual_seed(0)
    many_ties = torch.randint(-3, 4, (10, 5), generator=draw).float()
    images = torch.randn(4, 5, 3, 2, generator=draw).to(memory_format=torch.channels_last)
    halves = torch.randn(10, generator=draw).bfloat16()
    tensors = [many_ties, images, halves]
    assert torch.equal(lowest(tensors, num), sorted_lowest([tensor.float() for tensor in tensors], num))


def test_keys_are_in_the_order_of_the_values() -> None:
    values = torch.tensor([-torch.inf, -2.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf])
    assert ascending(values).diff().gt(0).all()
    assert descending(values).diff().lt(0).all()
    assert torch.equal(ascending(values.double()), ascending(values))


def test_equal_values_alone_give_exactly_so_many() -> None:
    assert lowest([torch.zeros(7, 3), torch.zeros(4)], 11).tolist() == [True] * 11 + [False] * 14
