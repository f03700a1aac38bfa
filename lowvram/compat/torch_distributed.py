"""Private names of torch.distributed: FSDP2's collectives, fake ranks, and DTensor's shape propagation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator

DefaultAllGather = _fsdp_collectives.DefaultAllGather
"""FSDP2's default class for gathering weights.

torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather, since 2.9: `set_custom_all_gather` is public,
and takes an object with the same methods; inheriting them is safer than copying them. Replaced by a public
base class, if torch makes one.
"""


def pretend_ranks(num_ranks: int) -> None:
    """Make this process rank 0 of `num_ranks` fake ranks, whose collectives return at once without communication.

    torch.testing._internal.distributed.fake_pg, since 2.1: its import registers the backend "fake". Replaced by a
    public module with the same, if torch makes one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


@contextmanager
def shape_propagation_inside(context: AbstractContextManager[object]) -> Iterator[None]:
    """Inside it DTensor enters `context` each time it determines the shape of a result, for which it runs the operator
    on whole fake tensors.

    ShardingPropagator._propagate_tensor_meta_non_cached, since 2.6, is patched: a dispatch mode can't tell these
    runs from the program's own. Replaced by a public way to tell them apart, if torch makes one.
    """
    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_inside(propagator: ShardingPropagator, operation: Any) -> Any:
        with context:
            return propagate(propagator, operation)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_inside):
        yield


@contextmanager
def gathered_from(arrived: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside it FSDP2 gathers what `arrived` makes of a rank's weights.

    torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.all_gather_inputs, since 2.6, is patched: FSDP2 copies
    weights from the host with `to`, which copies nothing between fake tensors of one device. Replaced by a public hook,
    if torch makes one.
    """
    inputs: Any = FSDPParam.all_gather_inputs

    def arrived_inputs(parameter: FSDPParam) -> list[Tensor]:
        return [arrived(weight) for weight in inputs.fget(parameter)]

    with patch.object(FSDPParam, "all_gather_inputs", property(arrived_inputs)):
        yield
