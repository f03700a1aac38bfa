"""The ranks of a point, as the groups that do something together: all ranks, those with samples of their own, those
that split layers among them, those that hold the shards of a tensor. Code names the one that it means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowvram.compat.torch_modes import without_dispatch_modes

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
    """All ranks in rows: those of a row split layers among them and compute the same samples.

    Args:
        world: torch's group of all ranks, for which it was made.
        mesh: (rows, ranks of a row).
    """

    world: Any
    mesh: DeviceMesh


_laid_out: list[Layout] = []  # as torch's own group of all ranks, of which a process has one at a time


def lay_out(device: torch.device, num_in_row: int) -> None:
    """Put all ranks into rows of `num_in_row`, for as long as this process is one of them. A collective, unless they
    are in such rows."""
    row = tensor_mesh()
    if num_in_row == (1 if row is None else row.size()):
        return
    _laid_out.clear()
    if num_in_row > 1:
        shape = (all_ranks().size // num_in_row, num_in_row)
        with without_dispatch_modes():
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA, TENSOR))
        _laid_out.append(Layout(dist.group.WORLD, mesh))


def layout() -> Layout | None:
    """How all ranks are laid out; None if each is a row of its own."""
    is_valid = bool(_laid_out) and has_process_group() and _laid_out[0].world is dist.group.WORLD
    return _laid_out[0] if is_valid else None


def tensor_mesh() -> DeviceMesh | None:
    """This rank's row, over which layers are split; None if they aren't."""
    laid_out = layout()
    return None if laid_out is None else laid_out.mesh[TENSOR]


def row_ranks() -> Ranks | None:
    """This rank's row, whose ranks compute the same samples; None if it is alone."""
    row = tensor_mesh()
    return None if row is None else Ranks(row.get_group())


def is_in_first(mesh: DeviceMesh) -> bool:
    """Whether a mesh of some ranks is the first of several that hold the same, as rows do what isn't sharded over
    them."""
    laid_out = layout()
    if laid_out is None or mesh.size() == all_ranks().size:
        return True
    others = {DATA, TENSOR} - {*(mesh.mesh_dim_names or ())}
    return all(laid_out.mesh.get_local_rank(name) == 0 for name in others)


def data_ranks() -> Ranks:
    """The ranks that share out the samples of a logical batch: each computes a slice. Where layers are split, they are
    those at this rank's place in each row."""
    laid_out = layout()
    return Ranks() if laid_out is None else Ranks(laid_out.mesh.get_group(DATA))


def tell(line: str) -> None:
    """Print a line, once for all ranks."""
    if all_ranks().is_first:
        print(line, flush=True)


@cache
def tell_once(line: str) -> None:
    """The same, unless this process has printed this line before."""
    tell(line)


REPLICATE, SHARD = "dp_replicate", "dp_shard"  # the dimensions of meshes of data ranks, called as in torchtitan
DATA, TENSOR = "dp", "tp"  # those of all ranks


def device_mesh(device: torch.device, num_copies: int = 1) -> DeviceMesh:
    """The data ranks as torch's mesh (num_copies, size / num_copies) of such devices: weights can be sharded over its
    last dimension, and each index of the first has a copy. With one copy the mesh is (size,). Where layers are split,
    too, it is part of the mesh of all ranks, as FSDP2 wants it."""
    if (laid_out := layout()) is not None:
        return laid_out.mesh[DATA]
    num_shards = data_ranks().size // num_copies
    shape, names = ((num_shards,), (SHARD,)) if num_copies == 1 else ((num_copies, num_shards), (REPLICATE, SHARD))
    with without_dispatch_modes():  # in a plan, too, a mesh's tensors have values, which it reads, and are the host's
        return init_device_mesh(device.type, shape, mesh_dim_names=names)
