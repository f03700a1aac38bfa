"""The ranks that split layers among them: what each has of a parameter, and how they add up what they compute."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.shards import set_row_order


class Row(Protocol):
    """A row of ranks, as one of them sees it. Each must call the methods that the others call, in the same order."""

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

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, on each of them, for all to compute the same with it."""
        ...


@final
class MeshRow(Row):
    """Ranks that are processes. Parts are DTensors, so that whatever reads or saves a parameter finds it whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRow:
        return self

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


def packed_order(packed: tuple[int, ...], num_ranks: int) -> Tensor | None:
    """The order in which the features of layers that stand side by side are split: each rank's of all these layers,
    one rank after another. None: as they are."""
    if not packed:
        return None
    with without_dispatch_modes(), torch.device("cpu"):  # it takes nothing of the device
        layers = torch.arange(sum(packed)).split(packed)
        return torch.cat([layer.tensor_split(num_ranks)[rank] for rank in range(num_ranks) for layer in layers])
