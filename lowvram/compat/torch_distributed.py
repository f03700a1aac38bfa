"""Private names of torch's ranks: FSDP2's collectives, ranks that aren't there, and DTensor's questions about
shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor._sharding_prop import ShardingPropagator

DefaultAllGather = _fsdp_collectives.DefaultAllGather
"""How FSDP2 gathers weights unless it is told another way.

torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather, since 2.9: `set_custom_all_gather` is public,
and wants an object with its methods; what it allocates and calls is better inherited than copied. Replaced by a public
base class, if torch makes one.
"""


def pretend_ranks(num_ranks: int) -> None:
    """Make this process the first of so many, who answer at once and say nothing.

    torch.testing._internal.distributed.fake_pg, since 2.1: its import makes the backend "fake" known. Replaced by a
    public module with the same, if torch makes one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


@contextmanager
def shapes_found_inside(context: AbstractContextManager[object]) -> Iterator[None]:
    """Inside it DTensor enters `context` whenever it finds out a shape, which it does by running the operator on whole
    fake tensors. `context` is entered again and again.

    ShardingPropagator._propagate_tensor_meta_non_cached, since 2.6, is replaced: to a dispatch mode these runs look
    like the program's own. Replaced by a public sign of them, if torch makes one.
    """
    find: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def find_inside(propagator: ShardingPropagator, operation: Any) -> Any:
        with context:
            return find(propagator, operation)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", find_inside):
        yield
