"""Exactly so many elements of one tensor or of many, by their values, without a copy of all values.

Every value has a key: an int32 in the order of the values. The key of the last element that is chosen is found by
bisection, in passes over pieces of the tensors; among equal keys the first elements are chosen. Nothing waits for the
device, and no size depends on values, so it also runs on the tensors of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lowvram.core.rounds import followed

LOWEST, HIGHEST = -(2**31), 2**31 - 1  # keys
NUM_PASSES = 32  # halve the keys between LOWEST and HIGHEST until one is left
PIECE_NUMEL = 2**20  # whose keys exist at a time: temporaries of 4 and 8 MiB


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor.

    Args:
        keys: makes their keys anew (int32).
        chosen: a view of where to note whether each element is chosen (bool), which the keys may be made from.
    """

    keys: Callable[[], Tensor]
    chosen: Tensor


def rows_of(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors of one shape, in runs of rows of about `PIECE_NUMEL` elements."""
    first = tensors[0]
    at_once = max(1, PIECE_NUMEL * len(first) // max(1, first.numel()))
    return list(zip(*(tensor.split(at_once) for tensor in tensors), strict=True))


def ascending(values: Tensor) -> Tensor:
    """The keys of floating-point numbers: of a larger number a larger one. In fp32; those of -0.0 and 0.0 differ."""
    bits = values.float().view(torch.int32)
    return bits ^ ((bits >> 31) & HIGHEST)  # of negative numbers all bits but the sign are turned over


def descending(values: Tensor) -> Tensor:
    return ~ascending(values)


def choose_lowest(pieces: Sequence[Piece], num: int | Tensor) -> None:
    """Note in each piece which elements are among the `num` with the lowest keys of all pieces."""
    last = key_of_last(pieces, num)
    num_ties = num - count(pieces, lambda keys: keys < last)
    num_seen = torch.zeros_like(num_ties)
    for piece in pieces:
        keys = piece.keys()
        ties = keys == last
        places = ties.flatten().cumsum(0) + num_seen
        piece.chosen.copy_((keys < last) | (ties & (places <= num_ties).view(ties.shape)))
        num_seen = places[-1]


def key_of_last(pieces: Sequence[Piece], num: int | Tensor) -> Tensor:
    """The smallest key for which `num` elements or more have it or a lower one (0-dim)."""
    device = pieces[0].chosen.device
    low, high = (torch.full((), key, dtype=torch.int64, device=device) for key in (LOWEST, HIGHEST))
    for _ in followed(range(NUM_PASSES)):
        middle = (low + high) >> 1
        is_enough = count(pieces, lambda keys, middle=middle: keys <= middle) >= num
        low, high = torch.where(is_enough, low, middle + 1), torch.where(is_enough, middle, high)
    return high


def count(pieces: Sequence[Piece], is_counted: Callable[[Tensor], Tensor]) -> Tensor:
    """How many keys are counted (0-dim, int64)."""
    total = torch.zeros((), dtype=torch.int64, device=pieces[0].chosen.device)
    for piece in pieces:
        total += is_counted(piece.keys()).sum()
    return total
