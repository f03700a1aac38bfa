"""sharding=fsdp: torch.distributed.fsdp.fully_shard (FSDP2).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lowvram.compat.torch_distributed import DefaultAllGather, accept_gathers_in_turn, meshes_made_inside
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness
from lowvram.core.lockstep import Deed, Lockstep, in_lockstep
from lowvram.core.mesh import all_ranks, device_mesh, gradient_ranks
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, SHARDABLE
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.quiet import accept_views
from lowvram.core.rig import Rig
from lowvram.core.shards import make_contiguous, with_notes
from lowvram.knobs.sharding.base import over_ranks
from lowvram.knobs.sharding.in_rows import InRows
from lowvram.knobs.sharding.released import released

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FSDP(InRows):
    """Every rank holds its shard of each weight, gradient and optimizer state. A block's weights are gathered when the
    block computes. With `replicate` above 1 there are as many copies (HSDP): weights are sharded over the ranks of each
    copy alone, and gradients are summed over the copies as well.

    Args:
        reshard_after_forward: whether a block's weights are sharded again between its forward and its backward pass; a
            number shards them over so many ranks there, such as the cards of one machine.
        reduce: the format in which gradients are summed over the ranks; None for their own.
    """

    reshard_after_forward: bool | int = True
    reduce_every_part: bool = True
    replicate: int = 1
    reduce: str | None = None

    saves = Kind.PARAMETERS
    needs_always = InRows.needs_always | {SEPARATE_MEMORY, REAL_WEIGHTS, SHARDABLE, STEADY_WEIGHTS}
    breaks_always = frozenset({Fact.WHOLE_PARAMS, Fact.WHOLE_UPDATES})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.replicate >= 1, "sharding.replicate", self.replicate, "at least 1")
        require(self.reduce in (None, *FORMATS), "sharding.reduce", self.reduce, f"null or one of {', '.join(FORMATS)}")
        allowed = "1 with sharding.replicate above 1: copies of shards of parts of layers can't be had"
        require(self.tensor == 1 or self.replicate == 1, "sharding.tensor", self.tensor, allowed)
        allowed = "1, or the ranks of a row: with all ranks in one row nothing is left to shard (sharding=tensor)"
        require(self.tensor is not None, "sharding.tensor", self.tensor, allowed)
        allowed = "1 with sharding.replicate above 1: shards are then over the ranks that share out samples and tokens"
        require(self.context == 1 or self.replicate == 1, "sharding.context", self.context, allowed)

    @property
    def exactness(self) -> Exactness:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Exactness.LOSSY if self.reduce == "bf16" else Exactness.EXACT

    def check_ranks(self, num_ranks: int) -> None:
        """Raise BadInput for numbers that don't divide the ranks."""
        allowed = f"1, or a number that divides the {num_ranks} ranks into copies of several each"
        is_divided = num_ranks % self.replicate == 0 and self.replicate < num_ranks
        require(self.replicate == 1 or is_divided, "sharding.replicate", self.replicate, allowed)
        number, num_shards = self.reshard_after_forward, num_ranks // self.replicate
        allowed = f"true, false, or a number between 1 and {num_shards} that divides it: the ranks of one copy"
        is_part = isinstance(number, bool) or (1 < number < num_shards and num_shards % number == 0)
        require(is_part, "sharding.reshard_after_forward", number, allowed)

    def apply(self, rig: Rig) -> Rig:
        self.check_ranks(gradient_ranks().size)
        # Compiled code for one rank's shards doesn't fit another rank's, and torch 2.13's cache mixes them up.
        torch.compiler.config.cache_key_tag = f"rank {all_ranks().rank} of {all_ranks().size}"
        mesh, before = device_mesh(rig.device, self.replicate), dict(rig.model.named_parameters())
        accept_views()
        accept_gathers_in_turn()
        make_contiguous(rig.model)
        policy = MixedPrecisionPolicy(reduce_dtype=FORMATS.get(self.reduce or ""), cast_forward_inputs=False)
        # What is split, too, gets a mesh of two dimensions, and the values of a mesh are read.
        real = without_dispatch_modes() if self.splits_layers else nullcontext()
        with meshes_made_inside(without_dispatch_modes), real:
            for block in filter(has_weights, rig.structure.blocks):
                rig.shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
            # Weights outside blocks: they stay gathered until the backward pass.
            rig.shard(rig.model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        for name, parameter in rig.model.named_parameters():  # new objects
            with_notes(parameter, before[name])
        modules, lockstep = fsdp_modules(rig.model), in_lockstep(rig.model)
        gather = ReleasedAllGather if rig.device.type == "cpu" else DefaultAllGather
        for index, module in enumerate(modules):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(InStep(gather(), lockstep, index))
        forward = rig.forward if lockstep is None else partial(lockstep.forward, rig.forward)
        rig = replace(over_ranks(rig), forward=forward, sync=partial(self.sync, rig, lockstep))
        return self.in_rows(rig)

    @contextmanager
    def sync(self, rig: Rig, lockstep: Lockstep | None, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one part."""
        model: Any = rig.model
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or self.reduce_every_part)
        if self.replicate > 1:  # parts add up within each copy; copies meet once a step
            model.set_requires_all_reduce(is_last)
        are_summed = is_last or (self.reduce_every_part and self.replicate == 1)
        with rig.sync(is_last) if are_summed else nullcontext():
            yield
        if lockstep is not None:
            lockstep.end()


def has_weights(module: nn.Module) -> bool:
    """Not of blocks that other ranks of a pipeline have."""
    return next(module.parameters(), None) is not None


class ReleasedAllGather(DefaultAllGather):
    """An all-gather that returns only when nobody else holds the gathered tensor, of which FSDP then makes a copy."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if async_op:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with released(output_tensor):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class InStep(DefaultAllGather):
    """An all-gather before which all ranks agree whose weights they gather.

    Args:
        index: of the module whose weights they are, among those that FSDP shards.
    """

    def __init__(self, gather: DefaultAllGather, lockstep: Lockstep | None, index: int) -> None:
        self.gather, self.lockstep, self.index = gather, lockstep, index

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.lockstep is not None:
            self.lockstep.meet(self.index, Deed.GATHERS)
        return self.gather(output_tensor, input_tensor, group, async_op)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
