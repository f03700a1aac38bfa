"""The largest weights outside the blocks stay in host memory: embeddings, and the layer that makes the logits.

An embedding looks its rows up there, and only they go to the device. The weight of the last layer visits the device
while that layer computes; with logits=tiled only a tile of it does.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowvram.core import host
from lowvram.core.host_weights import visiting
from lowvram.core.lookup import HostTable, only_looks_up


def keep_tables_on_host(
    model: nn.Module, head: nn.Linear | None, blocks: list[nn.Module], mesh: DeviceMesh | None, room: host.Room
) -> set[nn.Parameter]:
    """Have embeddings and the head read their weights, which have no memory yet, from host memory. Returns these
    weights.

    Args:
        mesh: they become shards over it, as FSDP2 makes of its own, so that optimizers can take them together; None:
            they stay plain parameters.
        room: in which host memory.

    Nothing if the head isn't known: then the model may make its logits with the embeddings' weight itself.
    """
    if head is None:
        return set()
    of_blocks = {parameter for block in blocks for parameter in block.parameters()}
    kept: list[nn.Parameter] = []
    for weight, modules in users_of_weights(model).items():
        if weight in of_blocks or not weight.is_meta or not all(reads_from_host(each, head) for each in modules):
            continue
        if mesh is not None:
            sharded = DTensor.from_local(weight.detach(), mesh, [Shard(0)], run_check=False)
            weight = nn.Parameter(sharded, weight.requires_grad)
        kept.append(weight)
        host.assign(weight, room)
        for module in modules:
            module.weight = weight
            module.forward = HostTable(module) if only_looks_up(module) else HostHead(head)  # pyright: ignore[reportAttributeAccessIssue]
    return set(kept)


def users_of_weights(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Each parameter that modules have as their `weight`, and nowhere else, with these modules."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    others = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if name == "weight":
                users.setdefault(parameter, []).append(module)
            else:
                others.add(parameter)
    return {weight: modules for weight, modules in users.items() if weight not in others}


def reads_from_host(module: nn.Module, head: nn.Linear) -> bool:
    """Whether the module's weight may stay in host memory: it is an embedding or the head, with its usual forward
    pass."""
    is_known = only_looks_up(module) or (module is head and type(head) is nn.Linear)
    return is_known and "forward" not in vars(module)


@final
class HostHead:
    """The forward pass of a linear layer whose weight stays in host memory."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, visiting(self.head.weight, input.device), self.head.bias)
