"""offload=parameters: weights are kept in host memory and copied to the device block by block.

FSDP2 with its CPUOffloadPolicy: over the ranks of sharding=fsdp, or over a single one. Gradients go to the host, so the
optimizer's state is there, too, and the CPU computes its updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core import host
from lowvram.core.fact import Fact
from lowvram.core.host_tables import keep_tables_on_host
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.mesh import data_ranks
from lowvram.core.misfits import ONCE
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, SHARDABLE
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.quiet import accept_views
from lowvram.core.rig import Rig
from lowvram.core.shards import local, make_contiguous


@dataclass(frozen=True)
class Parameters(Knob):
    """A block's weights are copied to the device for its forward pass and again for its backward pass, and freed after
    each. With one rank only those rows of embeddings go there that are looked up, and the last layer's weight is there
    while that layer computes. Other weights outside the blocks stay from the forward to the end of the backward pass.
    """

    pin_memory: bool = True

    stage = Stage.PLACE
    moves_to_host = True
    misfits: ClassVar[Mapping[str, str]] = {
        **ONCE,
        r"for (?:storage|input) of size 0\b": "weights are read in forward passes of their modules alone, as"
        " derivatives in the model's forward pass aren't: choose offload=none",
        # FSDP2's function around the inputs of a block. Torch forbids such a change of other views with every option.
        "RegisterPostBackwardFunction.* is being modified inplace": "blocks change nothing in place that they are"
        " given: choose offload=none",
    }
    band = 2e-6  # AdamW is equal to the bit; torch 2.13 has no fused SGD for shards, and the other one rounds otherwise
    saves = Kind.PARAMETERS
    needs_always = frozenset(
        {Fact.OWN_SHARE, Fact.DEVICE_WEIGHTS, SEPARATE_MEMORY, REAL_WEIGHTS, SHARDABLE, STEADY_WEIGHTS}
    )
    breaks_always = frozenset({Fact.WHOLE_PARAMS, Fact.WHOLE_UPDATES})
    remedy = (Kind.PARAMETERS, 20)

    def apply(self, rig: Rig) -> Rig:
        policy = CPUOffloadPolicy(pin_memory=self.pin_memory and not host.is_device(rig.device))
        rig = replace(rig, shard=partial(shard_on_host, policy), sync=partial(gradients_to_host, rig))
        if data_ranks().size == 1:  # else the option of `sharding` calls `rig.shard`
            shard_over_one(rig, policy.pin_memory)
        return rig


def shard_over_one(rig: Rig, pin_memory: bool) -> None:
    """What an option of `sharding` would do, for a single rank."""
    mesh, blocks = mesh_of_one(rig.device), rig.structure.blocks
    accept_views()
    make_contiguous(rig.model)
    room = partial(host.empty_like, pin=True) if pin_memory else host.pageable
    tables = keep_tables_on_host(rig.model, rig.structure.head, blocks, mesh, room)
    for module in [*blocks, rig.model]:
        rig.shard(module, mesh=mesh, reshard_after_forward=module is not rig.model, ignored_params=tables)
    for module in rig.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def shard_on_host(
    policy: CPUOffloadPolicy, module: nn.Module, *, reshard_after_forward: bool | int = True, **options: Any
) -> None:
    """As torch's `fully_shard`, for weights that are kept in host memory. Copies to the device are counted."""
    fully_shard(module, reshard_after_forward=reshard_after_forward, offload_policy=policy, **options)
    arriving = [parameter for parameter in module.parameters() if not host.is_assigned(parameter)]
    num_visits = 2 if reshard_after_forward is True else 1  # a number shards them again on the device
    module.register_forward_pre_hook(torch.compiler.disable(partial(arrive, arriving, num_visits)))  # pyright: ignore[reportArgumentType]
    for parameter in arriving:
        host.assign(parameter)


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """The mesh that FSDP2 needs, over a process group of this process alone."""
    with without_dispatch_modes():  # in a plan, too, a mesh's tensors have values, which it reads, and are the host's
        if not dist.is_initialized():
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return init_device_mesh(device.type, (1,))


def bytes_of(tensors: list[nn.Parameter]) -> int:
    """Of this rank's shards."""
    return sum(local(tensor).numel() * tensor.itemsize for tensor in tensors)


def arrive(weights: list[nn.Parameter], num_visits: int, *_: Any) -> None:
    """A forward pre-hook that counts a module's copies to the device, those for the backward pass included."""
    host.traffic.to_device_bytes += bytes_of(weights) * (num_visits if torch.is_grad_enabled() else 1)
    for shard in map(local, weights):  # FSDP2 pads them when the model first computes, in other memory
        if not host.is_marked(shard.untyped_storage()):
            host.mark(shard)


@contextmanager
def gradients_to_host(rig: Rig, is_last: bool) -> Iterator[None]:
    """Around forward and backward of one part: its gradients go to the host as autograd computes them."""
    trainable = rig.trainable
    # If the device is the CPU, FSDP2 doesn't move gradients, so hooks do. On a card they would prevent its overlapping.
    watched = trainable if host.is_device(rig.device) else []
    handles = [parameter.register_post_accumulate_grad_hook(to_host) for parameter in watched]
    try:
        with rig.sync(is_last):
            yield
    finally:
        for handle in handles:
            handle.remove()
    host.traffic.to_host_bytes += bytes_of(trainable)


def to_host(parameter: Tensor) -> None:
    """Move a gradient into host memory, unless a stepper has already used it or it is there."""
    gradient = None if parameter.grad is None else local(parameter.grad)
    if gradient is None or host.is_marked(gradient.untyped_storage()):
        return
    kept = torch.empty_like(parameter)
    host.mark(local(kept)).copy_(gradient)
    parameter.grad = kept
