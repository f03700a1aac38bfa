"""offload=parameters: weights are kept in host memory and copied to the device block by block.

FSDP2 over a single rank: torch.distributed.fsdp.fully_shard with its CPUOffloadPolicy. Gradients go to the host, so the
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

from lowvram.compat.torch_fake import without_fake_mode
from lowvram.core import host
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.misfits import ONCE
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, SHARDABLE
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.quiet import accept_views
from lowvram.core.rig import Rig
from lowvram.core.shards import local, make_contiguous
from lowvram.knobs.offload.tables import keep_tables_on_host


@dataclass(frozen=True)
class Parameters(Knob):
    """A block's weights are copied to the device for its forward pass and again for its backward pass, and freed after
    each. Of embeddings only the rows that are looked up go there, and the last layer's weight is there while that layer
    computes. Other weights outside the blocks stay from the forward to the end of the backward pass."""

    pin_memory: bool = True

    stage = Stage.SHARD
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
    needs_always = frozenset({Fact.ONE_RANK, SEPARATE_MEMORY, REAL_WEIGHTS, SHARDABLE, STEADY_WEIGHTS})
    breaks_always = frozenset({Fact.WHOLE_PARAMS, Fact.WHOLE_UPDATES})
    remedy = (Kind.PARAMETERS, 20)

    def apply(self, rig: Rig) -> Rig:
        mesh = mesh_of_one(rig.device)
        accept_views()
        policy = CPUOffloadPolicy(pin_memory=self.pin_memory and not host.is_device(rig.device))
        make_contiguous(rig.model)
        blocks = rig.structure.blocks
        tables = keep_tables_on_host(rig.model, rig.structure.head, blocks, mesh, policy.pin_memory)
        for module in [*blocks, rig.model]:
            arriving = [parameter for parameter in module.parameters() if not host.is_assigned(parameter)]
            fully_shard(module, mesh=mesh, offload_policy=policy, ignored_params=tables)
            num_visits = 1 if module is rig.model else 2  # blocks are copied again for the backward pass
            module.register_forward_pre_hook(partial(count_arrival, bytes_of(arriving), num_visits))
            for parameter in module.parameters():
                if parameter not in tables:
                    host.assign(parameter)
        for module in rig.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return replace(rig, sync=partial(gradients_to_host, rig))


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """The mesh that FSDP2 needs, over a process group of this process alone."""
    with without_fake_mode():  # a mesh reads the values of its tensors, so they must be real in a plan, too
        if not dist.is_initialized():
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return init_device_mesh(device.type, (1,))


def bytes_of(tensors: list[nn.Parameter]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def count_arrival(num_bytes: int, num_visits: int, *_: Any) -> None:
    """A forward pre-hook that counts a module's copies to the device, those for the backward pass included."""
    host.traffic.to_device_bytes += num_bytes * (num_visits if torch.is_grad_enabled() else 1)


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
