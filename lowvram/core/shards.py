"""Gradients and states that may be this rank's shards of larger tensors (DTensor)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing into it writes into the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached. Of a sharded one the other ranks bring their shards: all must ask."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` as `like` lies over the ranks: itself, or this rank's shard of it, in memory of its own. Nothing travels:
    every rank brings the same `whole`."""
    if not isinstance(like, DTensor):
        return whole
    shard = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        shard.to_local().clone(), like.device_mesh, like.placements, shape=whole.shape, stride=whole.stride()
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors as one vector (0-dim, at least fp32), over the shards of all ranks too.

    Waits for nothing but, with shards, the other ranks: all must call it.
    """
    return square_sum(tensors).sqrt()


def square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all squares (0-dim, at least fp32), over the shards of all ranks too."""
    tensors = list(tensors)
    if not tensors:
        return torch.zeros(())
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    whole = [tensor for tensor in tensors if not is_sharded(tensor)]
    total = _local_square_sum(whole, tensors[0])
    if sharded:
        of_all_ranks = _local_square_sum(sharded, tensors[0])
        dist.all_reduce(of_all_ranks, group=sharded[0].device_mesh.get_group())  # pyright: ignore[reportAttributeAccessIssue]
        total = total + of_all_ranks
    return total


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of a tensor."""
    return isinstance(tensor, DTensor) and not all(isinstance(place, Replicate) for place in tensor.placements)


def _local_square_sum(tensors: list[Tensor], like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not tensors:
        return torch.zeros((), dtype=dtype, device=local(like).device)
    norms = [torch.linalg.vector_norm(local(tensor), dtype=dtype) for tensor in tensors]
    return torch.stack(norms).square().sum()
