"""Saved states of sharded parameters, and what stands for the parameters in optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lowvram.core.copies import original
from lowvram.core.shards import local, placed
from lowvram.core.states import placed_value
from lowvram.knobs.sharding.zero1 import OwnRows
from tests.ranks import one_rank_alone


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with one_rank_alone():
        yield


def test_means_over_a_dimension_are_spread_as_their_parameter_is() -> None:
    """Adam-mini's second moments have the length 1 in it; beside a sharded gradient a plain tensor would be refused."""
    parameter = distribute_tensor(torch.zeros(7, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    for shape, place in (((7, 3), Shard(0)), ((7, 1), Shard(0)), ((1, 3), Replicate())):
        value = placed_value(torch.ones(shape), parameter)
        assert isinstance(value, DTensor)
        assert value.placements == (place,)
        assert torch.equal(local(placed(value, parameter)), torch.ones(shape))  # it may be sharded already
    for shape in ((), (7,), (7, 2), (5, 3)):
        assert type(placed_value(torch.ones(shape), parameter)) is torch.Tensor


def test_optimizers_know_the_parameters_behind_zero1s_rows() -> None:
    """Muon and Adam-mini ask which layer a weight belongs to."""
    weight = nn.Parameter(torch.zeros(7, 3))
    (part,) = OwnRows(init_device_mesh("cpu", (1,))).of([weight])
    assert original(part) is weight
