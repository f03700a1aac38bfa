"""The ranks that split layers among them: what each has of a parameter, and how they add up what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lowvram.compat.torch_distributed import all_gather, reduce_scatter
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.row_shape import TENSOR
from lowvram.core.shards import set_row_order
from lowvram.knobs.sharding.released import released


class Row(Protocol):
    """A row of ranks, as one of them sees it. Each must call the methods that the others call, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def part(self, whole: nn.Parameter, dim: int, order: Tensor | None) -> nn.Parameter:
        """What this rank has of a parameter that is split in a dimension.

        Args:
            order: in which the features are taken; None: in their own.
        """
        ...

    def read_by_all(self, x: Tensor) -> Tensor:
        """What all ranks have, for each to compute with it; in the backward pass their gradients are added up."""
        ...

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer of what all ranks have: F.linear of `read_by_all(x)`."""
        return F.linear(self.read_by_all(x), weight, bias)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, on each of them, for all to compute the same with it."""
        ...

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The tokens of all ranks, one rank after another, without autograd.

        Args:
            x: (..., tokens of this rank, d).
            sizes: how many tokens each rank has; or a multiple, of several samples in one dimension.
        """
        ...

    def scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of the sum over the ranks this rank's tokens, without autograd.

        Args:
            x: (..., tokens of all ranks, d).
            sizes: as in `gather`.
        """
        ...


@final
class MeshRow(Row):
    """Ranks that are processes. Parts are DTensors, so that whatever reads or saves a parameter finds it whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRow:
        return self

    @property
    def rank(self) -> int:
        return self._mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self._mesh.size()

    def part(self, whole: nn.Parameter, dim: int, order: Tensor | None) -> nn.Parameter:
        spread = distribute_tensor(whole.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
        part = nn.Parameter(spread, whole.requires_grad)
        set_row_order(part, order)
        return part

    def read_by_all(self, x: Tensor) -> Tensor:
        return DTensor.from_local(x, self._mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def summed(self, x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, self._mesh, [Partial()], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local()

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        own = x.reshape(-1, *x.shape[-2:])  # (l, s, d)
        lengths = [size * (own.shape[1] // sizes[self.rank]) for size in sizes]
        longest = max(lengths)
        own = F.pad(own, (0, 0, 0, longest - own.shape[1])).contiguous()
        found = own.new_empty(self.size, *own.shape)
        with released(found, own):
            all_gather(found.view(-1, *own.shape[1:]), own, self._mesh.get_group())
        if len(own) == 1 and min(lengths) == longest:
            return found.view(*x.shape[:-2], -1, x.shape[-1])
        pieces = [each[:, :length] for each, length in zip(found, lengths, strict=True)]
        return torch.cat(pieces, 1).view(*x.shape[:-2], -1, x.shape[-1])

    def scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        whole = x.reshape(-1, *x.shape[-2:])  # (l, t, d)
        lengths = [size * (whole.shape[1] // sum(sizes)) for size in sizes]
        longest = max(lengths)
        padded = torch.cat([F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in whole.split(lengths, 1)])
        own = whole.new_empty(len(whole), longest, whole.shape[2])
        with released(own, padded):
            reduce_scatter(own, padded, self._mesh.get_group()).wait()
        del padded
        return own[:, : lengths[self.rank]].reshape(*x.shape[:-2], -1, x.shape[-1])


def is_in_row(tensor: Tensor) -> bool:
    """Whether the ranks of a row have parts of a tensor."""
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())


def packed_order(packed: tuple[int, ...], num_ranks: int) -> Tensor | None:
    """The order in which the features of layers that stand side by side are split: each rank's of all these layers,
    one rank after another. None: as they are."""
    if not packed:
        return None
    with without_dispatch_modes(), torch.device("cpu"):  # it takes nothing of the device
        layers = torch.arange(sum(packed)).split(packed)
        return torch.cat([layer.tensor_split(num_ranks)[rank] for rank in range(num_ranks) for layer in layers])
