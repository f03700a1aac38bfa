"""Private names of torch.distributed: FSDP2's collectives, fake ranks, and DTensor's shape propagation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Placement, Shard, _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from lowvram.compat.replaced import replaced


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The ranks of several dimensions of a mesh, in one dimension. A collective.

    torch.distributed.device_mesh.DeviceMesh._flatten, since 2.5. Replaced by a public method, if torch makes one.
    """
    return mesh[names]._flatten()


DefaultAllGather = _fsdp_collectives.DefaultAllGather
"""FSDP2's default class for gathering weights.

torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather, since 2.9: `set_custom_all_gather` is public,
and takes an object with the same methods; inheriting them is safer than copying them. Replaced by a public
base class, if torch makes one.
"""


def before_reductions(module: FSDPModule, agreed: Callable[[list[bool]], list[bool]]) -> int:
    """Call `agreed` each time FSDP2 is about to reduce the gradients of the module's group over the ranks, with whether
    each parameter of the group that trains has one on this rank. Where the answer says that a parameter must have one
    that has none, it gets zeros: FSDP2 reduces what it finds, and so would add gradients of different parameters where
    ranks find different ones.

    torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward, since 2.6, is wrapped. (The
    public set_reduce_scatter_unused_params, since 2.13, gives zeros to what no rank uses, too, so that weight decay
    moves it.) Replaced by a public hook, if torch makes one.

    Returns:
        How many parameters train, at most, in one group.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since 2.12; before there was one at most
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    for group in groups:
        group.post_backward = partial(reduce_group, group, group.post_backward, agreed, list[Any]())
    return max((len(group.fsdp_params) for group in groups), default=0)


def reduce_group(
    group: Any, post_backward: Callable[..., None], agreed: Callable[..., list[bool]], waiting: list[Any], *unused: Any
) -> None:
    """What a group does instead of its `post_backward`; see `before_reductions`. Copies of shards (HSDP) add up the
    sums of several parts before they meet: a parameter that one of these parts has used counts in all of them.

    FSDPParamGroup.fsdp_params and reduce_grads, since 2.6. Replaced with `before_reductions`.

    Args:
        waiting: the parameters in the sum of earlier parts, which is kept from part to part.
    """
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    if not (group.reduce_grads and trained):
        post_backward(*unused)
        return
    found = [has_gradient(each) for each in trained]
    known = {id(each) for each in waiting}
    must_have = agreed([has or id(each) in known for each, has in zip(trained, found, strict=True)])
    for each, has, must in zip(trained, found, must_have, strict=True):
        if must and not has:
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
    reduced = [each for each, must in zip(trained, must_have, strict=True) if must]
    if len(reduced) > len(waiting) > 0:
        make_room(group, waiting, reduced)
    post_backward(*unused)
    waiting[:] = [] if group._partial_reduce_output is None else reduced


def make_room(group: Any, waiting: list[Any], reduced: list[Any]) -> None:
    """Put zeros for further parameters into the sum of earlier parts, in which those of `waiting` are.

    FSDPParamGroup._partial_reduce_output, comm_ctx and device_handle, and FSDPParam.padded_sharded_param_size, since
    2.6. Replaced with `before_reductions`.
    """
    with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
        before: Tensor = group._partial_reduce_output
        kept = before.split([each.padded_sharded_param_size.numel() for each in waiting])
        kept_of = {id(each): values for each, values in zip(waiting, kept, strict=True)}
        sizes = [(id(each), each.padded_sharded_param_size.numel()) for each in reduced]
        pieces = [kept_of[key] if key in kept_of else before.new_zeros(size) for key, size in sizes]
        group._partial_reduce_output = torch.cat(pieces)


def has_gradient(parameter: Any) -> bool:
    """Whether FSDP2 would reduce a gradient of this FSDPParam; see `before_reductions`.

    FSDPParam._unsharded_param and unsharded_accumulated_grad, since 2.6. Replaced with `before_reductions`.
    """
    gathered = getattr(parameter, "_unsharded_param", None)  # since it was first gathered
    return gathered is not None and (parameter.unsharded_accumulated_grad is not None or gathered.grad is not None)


def pretend_ranks(num_ranks: int, rank: int = 0) -> None:
    """Make this process one of `num_ranks` fake ranks, whose collectives return at once without communication.

    torch.testing._internal.distributed.fake_pg, since 2.1: its import registers the backend "fake". Replaced by a
    public module with the same, if torch makes one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)


def forget_meshes() -> None:
    """Have DTensor forget what it knows of operators. It keeps results for meshes that it takes as equal, though those
    of another fake rank have other groups.

    torch.distributed.tensor.debug's _clear_python_sharding_prop_cache, since 2.3, and
    _clear_fast_path_sharding_prop_cache, since 2.10; _redistribute._gen_transform_infos, since 2.6. Replaced by a
    public function, if torch makes one.
    """
    module: Any = debug
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(module, name, lambda: None)()
    transforms: Any = _redistribute._gen_transform_infos
    transforms.cache_clear()


def group_named(name: str) -> dist.ProcessGroup:
    """The group of ranks that DTensor's collectives are given by its name.

    torch.distributed.distributed_c10d._resolve_process_group, since 2.1. Replaced by a public function, if torch makes
    one.
    """
    module: Any = distributed_c10d
    return module._resolve_process_group(name)


def part_of_parts(place: Placement, num_parts: int) -> Placement:
    """How the rows of each rank's part of a tensor are shared out over further ranks, as FSDP2 does it.

    torch.distributed.tensor.placement_types._StridedShard, since 2.5: FSDP2's own parameters have it. Replaced by a
    public class, if torch makes one.

    Args:
        place: how the tensor is split into parts.
        num_parts: how many parts.
    """
    return _StridedShard(0, split_factor=num_parts) if place == Shard(0) and num_parts > 1 else Shard(0)


def accept_gathers_in_turn() -> None:
    """Keep torch (2.13) from logging that it gathers a tensor that is sharded twice in one dimension in two steps.

    The logger of torch.distributed.tensor._redistribute, since 2.10. Replaced by a setting, if torch makes one.
    """
    logging.getLogger(_redistribute.__name__).setLevel(logging.ERROR)


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

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_inside):
        yield


@contextmanager
def meshes_made_inside(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside it FSDP2 enters `context()` to make the mesh of `reshard_after_forward=4`.

    torch.distributed.fsdp._fully_shard._fully_shard._get_post_forward_mesh_info, since 2.6, is patched: a mesh reads
    the values of its tensors, which have none in a plan. Replaced by a public way to hand FSDP2 that mesh, if torch
    makes one.
    """
    module: Any = _fully_shard
    make = module._get_post_forward_mesh_info

    def make_inside(*args: Any) -> Any:
        with context():
            return make(*args)

    with replaced(module, "_get_post_forward_mesh_info", make_inside):
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

    with replaced(FSDPParam, "all_gather_inputs", property(arrived_inputs)):
        yield


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `whole` over the ranks of a group, each of which gets an equal part of the sum in `output`.

    dist.reduce_scatter_tensor is called reduce_scatter_single since 2.13, where the old name warns. Replaced by
    the new name once torch 2.13 is the oldest that is supported.
    """
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = start(output, whole, group=group, async_op=True)
    assert work is not None
    return work


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Give each rank the parts of all ranks of a group, one after another.

    dist.all_gather_into_tensor is called all_gather_single since 2.13, where the old name warns. Replaced by the
    new name once torch 2.13 is the oldest that is supported.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)
