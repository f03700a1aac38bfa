"""The ranks of a point, as the groups that do something together: all ranks, those with samples of their own, those
that split a model among them, those that hold the shards of a tensor. Code names the one that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowvram.compat.torch_distributed import flattened
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.row_shape import ALONE, CONTEXT, DATA, PIPELINE, TENSOR, RowShape

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Ranks:
    """Ranks that do something together. A method called a collective must be called by each of them.

    Args:
        group: torch's; None for all ranks of the point.
    """

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """The place of this process among them, counted from 0."""
        return dist.get_rank(self.group) if has_process_group() else 0

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group) if has_process_group() else 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of them: the one that writes and prints for all."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any of them. A collective. Waits for no device."""
        if self.size == 1:
            return flag
        answer = torch.tensor(int(flag))
        dist.all_reduce(answer, dist.ReduceOp.MAX, self.group)
        return bool(answer)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over them, as a new tensor. A collective. Doesn't wait for a CUDA device."""
        total = tensor.detach().clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def largest(self, values: list[int]) -> list[int]:
        """Of each value the largest on any of them. A collective of `on_hosts`. Waits for no device."""
        with without_dispatch_modes():  # it belongs to no step that is traced or measured
            numbers = torch.tensor(values)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, self.group)
            return numbers.tolist()

    def send_from_first(self, tensor: Tensor) -> None:
        """Give a tensor, in place, the values that it has on the first of them. A collective."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def gather(self, value: T) -> list[T]:
        """The value of each, in their order. A collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def some(self, places: Sequence[int]) -> Ranks:
        """Those at these places among them, of which this process is one. A collective of those."""
        if len(places) == self.size or dist.get_backend(self.group) == "fake":
            return self
        everyone = dist.get_process_group_ranks(self.group) if self.group else range(dist.get_world_size())
        group = dist.new_group([everyone[place] for place in places], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks(group)

    def on_hosts(self) -> Ranks | None:
        """The same ranks, for messages between their hosts that meet no other message; None where there is nobody to
        talk to: one rank, or a plan's fake ones. A collective."""
        if self.size == 1 or dist.get_backend(self.group) == "fake":
            return None
        ranks = None if self.group is None else dist.get_process_group_ranks(self.group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)  # not of all ranks
        assert isinstance(group, dist.ProcessGroup)
        return Ranks(group)


def has_process_group() -> bool:
    """Whether torch.distributed is initialised, so that this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def all_ranks() -> Ranks:
    """All processes of the point."""
    return Ranks()


@final
@dataclass(frozen=True)
class Layout:
    """All ranks in rows, whose ranks compute the same samples.

    Args:
        world: torch's group of all ranks, for which it was made.
        shape: of a row.
        mesh: as `RowShape.over`.
        groups: torch's groups of ranks that differ in some of the mesh's dimensions alone, by these.
    """

    world: Any
    shape: RowShape
    mesh: DeviceMesh
    groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    stage_hosts: Ranks | None  # see below

    def ranks(self, *names: str) -> Ranks | None:
        """The ranks that differ from this one in these dimensions alone; None if it is the only one."""
        there = tuple(name for name in self.mesh.mesh_dim_names or () if name in names)
        return Ranks(self.groups[there]) if there else None


_laid_out: list[Layout] = []  # as torch's own group of all ranks, of which a process has one at a time


def lay_out(device: torch.device, shape: RowShape) -> None:
    """Put all ranks into rows of this shape, for as long as this process is one of them. A collective, unless they are
    in such rows."""
    laid_out = layout()
    if shape == (ALONE if laid_out is None else laid_out.shape):
        return
    _laid_out.clear()
    if shape.size == 1:
        return
    sizes = shape.over(all_ranks().size)
    with without_dispatch_modes():
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        wanted: set[tuple[str, ...]] = {(name,) for name in sizes}
        with_targets = (DATA, TENSOR) if shape.own_tokens else (DATA, CONTEXT)
        for names in ((PIPELINE, CONTEXT, TENSOR), with_targets, (PIPELINE, DATA, CONTEXT)):
            wanted.add(tuple(name for name in names if name in sizes))
        groups = {names: group_over(mesh, names) for names in sorted(wanted - {()})}
        stage_hosts = Ranks(groups[(PIPELINE,)]).on_hosts() if shape.pipeline > 1 else None
    _laid_out.append(Layout(dist.group.WORLD, shape, mesh, groups, stage_hosts))


def group_over(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The group of ranks that differ from this one in these dimensions of a mesh alone. A collective."""
    if len(names) == 1:
        return mesh.get_group(names[0])
    if names == mesh.mesh_dim_names:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return dist.group.WORLD
    return flattened(mesh, names).get_group()


def layout() -> Layout | None:
    """How all ranks are laid out; None if each is a row of its own."""
    is_valid = bool(_laid_out) and has_process_group() and _laid_out[0].world is dist.group.WORLD
    return _laid_out[0] if is_valid else None


def tensor_mesh() -> DeviceMesh | None:
    """The ranks over which this rank's layers are split; None if they aren't."""
    laid_out = layout()
    return None if laid_out is None or laid_out.shape.tensor == 1 else laid_out.mesh[TENSOR]


def split_mesh() -> DeviceMesh | None:
    """The ranks at this one's place in a pipeline: in the first dimension those that share out the samples, in the
    second those over which layers are split; None if they aren't."""
    laid_out = layout()
    if laid_out is None or laid_out.shape.tensor == 1:
        return None
    with without_dispatch_modes():
        return laid_out.mesh[DATA, TENSOR]


def ranks_along(*names: str) -> Ranks | None:
    """The ranks that differ from this one in these dimensions of all ranks alone; None if it is the only one."""
    laid_out = layout()
    return None if laid_out is None else laid_out.ranks(*names)


def is_first_of_stage() -> bool:
    """Whether this rank is the first of those that have the same blocks; without a pipeline, of all ranks."""
    laid_out = layout()
    if laid_out is None or laid_out.shape.pipeline == 1:
        return all_ranks().is_first
    names = {*(laid_out.mesh.mesh_dim_names or ())} - {PIPELINE}
    return all(laid_out.mesh.get_local_rank(name) == 0 for name in names)


def dimension_of(group: dist.ProcessGroup) -> str:
    """The dimension of all ranks in which those of a group differ; of several, that of data."""
    laid_out = layout()
    groups = {} if laid_out is None else laid_out.groups
    found = [names for names, each in groups.items() if each.group_name == group.group_name]
    return next((names[0] for names in found if len(names) == 1), DATA)  # a group may be that of several names


def stage_hosts() -> Ranks | None:
    """This rank's pipeline, for messages between its hosts; None where no model is cut into stages, or in a plan."""
    laid_out = layout()
    return None if laid_out is None else laid_out.stage_hosts


def row_ranks() -> Ranks | None:
    """This rank's row, whose ranks compute the same samples; None if it is alone."""
    return ranks_along(PIPELINE, CONTEXT, TENSOR)


def is_in_first(mesh: DeviceMesh) -> bool:
    """Whether a mesh of some ranks is the first of several that hold the same, as rows do what isn't sharded over
    them."""
    laid_out = layout()
    if laid_out is None or mesh.size() == all_ranks().size:
        return True
    others = {*(laid_out.mesh.mesh_dim_names or ())} - {*(mesh.mesh_dim_names or ()), PIPELINE}  # stages hold others
    return all(laid_out.mesh.get_local_rank(name) == 0 for name in others)


def data_ranks() -> Ranks:
    """The ranks that share out the samples of a logical batch: each computes a slice. Where ranks share out a model,
    they are those at this rank's place in each row."""
    return ranks_along(DATA) or all_ranks()


def target_ranks() -> Ranks:
    """The ranks that share out the targets of a logical batch, by samples, and by the tokens of a sample: losses are
    sums over them."""
    return ranks_along(DATA, CONTEXT, *sharing_tokens()) or all_ranks()


def ranks_with_outputs() -> Ranks:
    """The ranks over which sums of what an evaluation tells are taken: each has its samples' outputs or, in a pipeline,
    nothing to add."""
    return ranks_along(PIPELINE, DATA, CONTEXT, *sharing_tokens()) or all_ranks()


def sharing_tokens() -> tuple[str, ...]:
    """The dimension of the ranks that split layers, if they share out the tokens, too."""
    laid_out = layout()
    return (TENSOR,) if laid_out is not None and laid_out.shape.own_tokens else ()


def gradient_ranks() -> Ranks:
    """The ranks that have the same weights, or would before they are sharded over them: gradients are sums over
    them."""
    return ranks_along(DATA, CONTEXT) or all_ranks()


def tell(line: str) -> None:
    """Print a line, once for all ranks."""
    if all_ranks().is_first:
        print(line, flush=True)


@cache
def tell_once(line: str) -> None:
    """The same, unless this process has printed this line before."""
    tell(line)


REPLICATE, SHARD = "dp_replicate", "dp_shard"  # the dimensions of meshes of data ranks, called as in torchtitan


def device_mesh(device: torch.device, num_copies: int = 1) -> DeviceMesh:
    """The data ranks as torch's mesh (num_copies, size / num_copies) of such devices: weights can be sharded over its
    last dimension, and each index of the first has a copy. With one copy the mesh is (size,). Where layers are split,
    too, it is part of the mesh of all ranks, as FSDP2 wants it; where tokens are shared out, that of `target_ranks`."""
    if (laid_out := layout()) is not None:
        with without_dispatch_modes():  # a mesh's tensors are the host's, and it reads their values, in a plan, too
            return laid_out.mesh[DATA] if laid_out.shape.context == 1 else flattened(laid_out.mesh, (DATA, CONTEXT))
    num_shards = data_ranks().size // num_copies
    shape, names = ((num_shards,), (SHARD,)) if num_copies == 1 else ((num_copies, num_shards), (REPLICATE, SHARD))
    with without_dispatch_modes():
        return init_device_mesh(device.type, shape, mesh_dim_names=names)
