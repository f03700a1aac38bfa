"""The ranks of a point: how many processes it has, and which of them this one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowvram.compat.torch_modes import without_dispatch_modes

T = TypeVar("T")


def rank() -> int:
    """The rank of this process, counted from 0."""
    return dist.get_rank() if has_process_group() else 0


def num_ranks() -> int:
    """How many processes the point has."""
    return dist.get_world_size() if has_process_group() else 1


def has_process_group() -> bool:
    """Whether torch.distributed is initialised, so that this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def agree(flag: bool) -> bool:
    """Whether `flag` is true on any rank. A collective: all ranks must call it. Waits for no device."""
    if num_ranks() == 1:
        return flag
    answer = torch.tensor(int(flag))
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def host_group() -> dist.ProcessGroup | None:
    """All ranks, for messages between their hosts that meet no other message; None where there is nobody to talk to:
    one rank, or a plan's fake ones. Made by a collective: all ranks must call it."""
    if num_ranks() == 1 or dist.get_backend() == "fake":
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def largest(values: list[int], group: dist.ProcessGroup) -> list[int]:
    """Of each value the largest on any rank. A collective of a `host_group`. Waits for no device."""
    with without_dispatch_modes():  # it belongs to no step that is traced or measured
        numbers = torch.tensor(values)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
        return numbers.tolist()


def gather_from_all(value: T) -> list[T]:
    """The value of each rank, in the order of ranks. A collective: all ranks must call it."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Rank 0 leaves the block before the others enter it. A collective: all ranks must enter it."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and num_ranks() > 1:
        dist.barrier()


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, as a new tensor. A collective: all ranks must call it. Doesn't wait for a CUDA device."""
    total = tensor.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total
