"""Private names of torch's ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.compat.sentences import needed


@contextmanager
def group_left() -> Iterator[None]:
    """Before and after it this process has no partners, whatever group an earlier test left."""
    leave_group()
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@needed("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather", by="sharding=fsdp on a CPU")
def test_a_gather_can_be_inherited() -> None:
    from lowvram.compat.torch_distributed import DefaultAllGather, pretend_ranks

    class Counting(DefaultAllGather):
        calls = 0

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            self.calls += 1
            return super().__call__(output_tensor, input_tensor, group, async_op)

    with group_left():
        pretend_ranks(2)
        module: Any = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (2,)))
        gather = Counting()
        module.set_custom_all_gather(gather)
        assert module(torch.ones(1, 3)).shape == (1, 2)
        assert gather.calls == 1


@needed("torch.testing._internal.distributed.fake_pg", by="a plan of several ranks")
def test_ranks_that_are_not_there_answer() -> None:
    from lowvram.compat.torch_distributed import pretend_ranks

    with group_left():
        pretend_ranks(4)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        dist.all_reduce(torch.ones(2))


@needed("torch.distributed.tensor.debug", by="a plan of sharding=pipeline whose layers are split")
def test_what_is_known_of_another_rank_s_mesh_is_forgotten() -> None:
    from lowvram.compat.torch_distributed import forget_meshes, pretend_ranks

    for rank in (0, 2):
        with group_left():
            pretend_ranks(4, rank)
            forget_meshes()
            if rank:
                dist.new_group([rank], use_local_synchronization=True)  # so that later groups have other names
            tensor: Any = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
            for made in (tensor * 3, tensor.redistribute(placements=[Replicate(), Replicate()])):
                for dim in (0, 1):
                    groups = [each.device_mesh.get_group(dim).group_name for each in (made, tensor)]
                    assert groups[0] == groups[1]


@needed("torch.distributed.tensor._sharding_prop.ShardingPropagator", by="a plan of sharding=fsdp")
def test_questions_about_shapes_are_noticed() -> None:
    from lowvram.compat.torch_distributed import pretend_ranks, shape_propagation_inside

    entered: list[int] = []

    class Noting:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            entered.append(-1)

    with group_left():
        pretend_ranks(2)
        tensor: Any = distribute_tensor(torch.ones(14, 11), init_device_mesh("cpu", (2,)), [Shard(0)])
        with shape_propagation_inside(Noting()):
            assert (tensor * 3).to_local().shape == (7, 11)
        assert sum(entered) == 0
        assert len(entered) >= 2
        entered.clear()
        assert (tensor * tensor).shape == (14, 11)
        assert not entered


@needed(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.all_gather_inputs", by="a plan of offload=parameters"
)
def test_weights_are_gathered_from_what_has_arrived() -> None:
    from lowvram.compat.torch_distributed import gathered_from, pretend_ranks

    seen: list[torch.Size] = []

    def arrived(weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.shape)
        return weight * 0

    with group_left():
        pretend_ranks(1)
        module: Any = fully_shard(torch.nn.Linear(3, 2, bias=False), mesh=init_device_mesh("cpu", (1,)))
        with gathered_from(arrived):
            assert module(torch.ones(1, 3)).tolist() == [[0.0, 0.0]]
        assert seen == [torch.Size([6])]


@needed(
    "torch.distributed.fsdp._fully_shard._fully_shard._get_post_forward_mesh_info",
    by="a plan of sharding.reshard_after_forward=2",
)
def test_the_mesh_between_forward_and_backward_is_made_inside() -> None:
    from lowvram.compat.torch_distributed import meshes_made_inside, pretend_ranks

    entered: list[int] = []
    with group_left():
        pretend_ranks(4)
        mesh = init_device_mesh("cpu", (4,))
        with meshes_made_inside(lambda: entered_in(entered)):
            for number in (True, 2):
                fully_shard(torch.nn.Linear(4, 4), mesh=mesh, reshard_after_forward=number)
    assert entered == [1, 1]


@needed("torch.distributed.reduce_scatter_single or reduce_scatter_tensor", by="sharding=zero1")
def test_one_rank_sums_and_gathers_its_own() -> None:
    from lowvram.compat.torch_distributed import all_gather, reduce_scatter

    with group_left():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group, found = dist.group.WORLD, torch.empty(2, 3)
        assert group is not None
        reduce_scatter(found, torch.ones(2, 3), group).wait()
        assert found.tolist() == [[1, 1, 1], [1, 1, 1]]
        all_gather(found, torch.zeros(2, 3), group)
        assert found.tolist() == [[0, 0, 0], [0, 0, 0]]


@contextmanager
def entered_in(seen: list[int]) -> Iterator[None]:
    seen.append(1)
    yield


class Half(torch.nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@needed("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward", by="sharding=fsdp")
def test_a_gradient_that_other_ranks_have_is_made() -> None:
    """`reduce_group` asks for each group which parameters `has_gradient` knows one of."""
    from lowvram.compat.torch_distributed import before_reductions, pretend_ranks

    asked: list[list[bool]] = []

    def agreed(own: list[bool]) -> list[bool]:
        asked.append(own)
        return [True for _ in own]

    with group_left():
        pretend_ranks(1)
        module: Any = fully_shard(Half(), mesh=init_device_mesh("cpu", (1,)))
        assert before_reductions(module, agreed) == 2
        module(torch.ones(1, 3)).sum().backward()
        assert asked == [[True, False]]
        assert module.unused.weight.grad.to_local().tolist() == [[0.0] * 3] * 2


class Either(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) if x[0, 0] > 0 else self.unused(x)


@needed(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output",
    by="sharding=fsdp with sharding.replicate and accum",
)
def test_a_sum_of_parts_has_room_for_what_later_parts_use() -> None:
    """What one part has used counts in those that follow it, and `make_room` puts zeros for it into the sum so far."""
    from lowvram.compat.torch_distributed import before_reductions, pretend_ranks

    asked: list[list[bool]] = []

    def agreed(own: list[bool]) -> list[bool]:
        asked.append(own)
        return own

    with group_left():
        pretend_ranks(4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        module: Any = fully_shard(Either(), mesh=mesh)
        before_reductions(module, agreed)
        for sign, is_last in ((1.0, False), (-1.0, False), (1.0, True), (-1.0, True)):
            module.set_requires_all_reduce(is_last)
            module(torch.full((1, 3), sign)).sum().backward()
        assert asked == [[True, False], [True, True], [True, True], [False, True]]


@needed("torch.distributed.device_mesh.DeviceMesh._flatten", by="sharding.context")
def test_two_dimensions_of_a_mesh_are_one() -> None:
    from lowvram.compat.torch_distributed import flattened, pretend_ranks

    with group_left():
        pretend_ranks(8)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        both = flattened(mesh, ("a", "c"))
        assert both.mesh.tolist() == [0, 1, 4, 5]
        assert dist.get_process_group_ranks(both.get_group()) == [0, 1, 4, 5]


@needed("torch.distributed.distributed_c10d._resolve_process_group", by="plan.wire_bytes with sharding=tensor")
def test_a_group_is_found_by_its_name() -> None:
    from lowvram.compat.torch_distributed import group_named, pretend_ranks

    with group_left():
        pretend_ranks(3)
        assert dist.group.WORLD is not None
        assert group_named(dist.group.WORLD.group_name).size() == 3


@needed("torch.distributed.tensor._redistribute.logger", by="sharding=fsdp sharding.tensor=2")
def test_gathers_in_turn_are_not_told() -> None:
    from torch.distributed.tensor import _redistribute

    from lowvram.compat.torch_distributed import accept_gathers_in_turn

    accept_gathers_in_turn()
    assert not _redistribute.logger.isEnabledFor(logging.WARNING)


@needed("torch.distributed.tensor.placement_types._StridedShard", by="sharding=zero1 sharding.tensor=2")
def test_parts_of_parts_are_laid_out_as_fsdp2_lays_them_out() -> None:
    """FSDP2 has rank r of the first dimension hold the r-th rows of the part that the second one splits."""
    from torch.distributed.tensor import DTensor, Shard

    from lowvram.compat.torch_distributed import part_of_parts, pretend_ranks

    assert part_of_parts(Shard(1), 2) == part_of_parts(Shard(0), 1) == Shard(0)
    with group_left():
        pretend_ranks(4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        layout = [part_of_parts(Shard(0), 2), Shard(0)]
        shape, stride = torch.Size((8, 3)), (3, 1)
        sharded = DTensor.from_local(torch.zeros(2, 3), mesh, layout, run_check=False, shape=shape, stride=stride)
        assert sharded.shape == (8, 3)
        assert sharded.to_local().shape == (2, 3)
