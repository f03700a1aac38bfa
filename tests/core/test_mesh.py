"""Groups of ranks: each tensor is summed over those that hold its shards, and no others."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowvram.core.mesh import Ranks, all_ranks, data_ranks
from lowvram.core.shards import SquareSum, groups_of, local, norms_of, total_norm, whole_norms
from tests.ranks import on_ranks

LAYOUTS = {  # over a mesh of two dimensions
    "over all": (Shard(0), Shard(1)),
    "over the first": (Shard(0), Replicate()),
    "over the second": (Replicate(), Shard(0)),
    "whole": (Replicate(), Replicate()),
}


def wholes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 6, generator=generator).double() for _ in (*LAYOUTS, "plain")]


def norms_over_four() -> tuple[float, float, list[float], list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    *laid_out, plain = wholes()
    tensors = [
        *(distribute_tensor(tensor, mesh, places) for tensor, places in zip(laid_out, LAYOUTS.values(), strict=True)),
        plain,
    ]
    squares = SquareSum()
    for tensor in reversed(tensors) if dist.get_rank() % 2 else tensors:  # ranks need not agree on an order
        squares.add(local(tensor), tensor)
    each = whole_norms(norms_of([local(tensor) for tensor in tensors]), tensors)
    num_groups = [len(groups_of(tensor)) for tensor in tensors]
    return squares.total().sqrt().item(), total_norm(tensors).item(), each.tolist(), num_groups


def test_norms_are_summed_over_the_ranks_that_hold_shards() -> None:
    wanted = [tensor.norm().item() for tensor in wholes()]
    total = math.hypot(*wanted)
    for added, at_once, each, num_groups in on_ranks(norms_over_four, num_ranks=4):
        assert added == pytest.approx(total, rel=1e-12)
        assert at_once == pytest.approx(total, rel=1e-12)
        assert each == pytest.approx(wanted, rel=1e-12)
        assert num_groups == [2, 1, 1, 0, 0]


def together() -> tuple[int, int, list[int], bool, list[int], Tensor, list[int]]:
    """What the two of four ranks that are a group do together, while the other two do the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ranks, place = Ranks(mesh.get_group("tensor")), dist.get_rank()
    sent = torch.tensor([float(place)])
    ranks.send_from_first(sent)
    return (
        ranks.rank,
        ranks.size,
        ranks.gather(place),
        ranks.any(place == 3),
        ranks.sum(torch.tensor([place])).tolist(),
        sent,
        ranks.largest([place, -place]),
    )


def test_ranks_of_a_group_leave_the_others_alone() -> None:
    for place, (rank, size, gathered, is_any, total, sent, largest) in enumerate(on_ranks(together, num_ranks=4)):
        first = place - place % 2
        assert (rank, size, gathered) == (place % 2, 2, [first, first + 1])
        assert is_any == (first == 2)
        assert total == [2 * first + 1]
        assert sent.item() == first
        assert largest == [first + 1, -first]


def test_one_process_is_alone() -> None:
    for ranks in (all_ranks(), data_ranks()):
        assert (ranks.rank, ranks.size, ranks.is_first, ranks.any(False), ranks.gather("a")) == (
            0,
            1,
            True,
            False,
            ["a"],
        )
        assert ranks.sum(torch.ones(2)).tolist() == [1.0, 1.0]
        assert ranks.on_hosts() is None
    assert groups_of(torch.ones(2)) == ()
