"""The ranks of a point: how many processes it has, and which of them this one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """Of this process, counted from 0."""
    return dist.get_rank() if is_one_of_many() else 0


def num_ranks() -> int:
    """How many processes the point has."""
    return dist.get_world_size() if is_one_of_many() else 1


def is_one_of_many() -> bool:
    """Whether the processes of the point know each other."""
    return dist.is_available() and dist.is_initialized()


def agree(flag: bool) -> bool:
    """Whether any rank says yes; all must ask. Waits for the other ranks, but for no device."""
    if num_ranks() == 1:
        return flag
    answer = torch.tensor(int(flag))
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def of_all(value: T) -> list[T]:
    """The value of each rank, in their order; all must ask."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def first_goes_first() -> Iterator[None]:
    """Rank 0 is through the block before the others enter it; all must."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and num_ranks() > 1:
        dist.barrier()


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, a new tensor; all must ask. Waits for nothing but, on the CPU, the other ranks."""
    total = tensor.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total
