"""The ranks of a point: how many processes it has, and which of them this one is."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """Of this process, counted from 0."""
    return dist.get_rank() if is_one_of_many() else 0


def num_ranks() -> int:
    """How many processes the point has."""
    return dist.get_world_size() if is_one_of_many() else 1


def is_one_of_many() -> bool:
    """Whether the processes of the point know each other."""
    return dist.is_available() and dist.is_initialized()


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, a new tensor; all must ask. Waits for nothing but, on the CPU, the other ranks."""
    total = tensor.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total
