"""sharding: how the point is spread over several ranks. Each rank takes its own slice of the logical batch.

The gradients of all ranks are *summed*, and every loss is divided by the number of targets of all ranks' parts. A mean
over ranks would weight targets differently if ranks have unequal numbers of them.

DDP: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020).
FSDP: Rajbhandari et al., "ZeRO" (2020); torch.distributed.fsdp.fully_shard (FSDP2).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowvram.compat.torch_distributed import DefaultAllGather
from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_modules import BatchNorm
from lowvram.compat.torch_storage import num_holders
from lowvram.config.errors import Incompatible, require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.lockstep import Deed, Lockstep, in_lockstep
from lowvram.core.mesh import all_ranks, data_ranks, device_mesh
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, SHARDABLE
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.quiet import accept_views
from lowvram.core.rank_buffers import RankBuffers
from lowvram.core.rig import Part, Rig
from lowvram.core.shards import as_real, make_contiguous


@dataclass(frozen=True)
class Sharding(Knob):
    """The base of this group's options."""

    ranks: str = "auto"
    timeout_s: float = 45.0

    stage = Stage.SHARD

    def __post_init__(self) -> None:
        is_number = bool(re.fullmatch(r"0*[1-9]\d{0,8}", self.ranks))
        require(self.ranks == "auto" or is_number, "sharding.ranks", self.ranks, "auto or at least 1")
        is_positive = 0 < self.timeout_s < math.inf
        require(is_positive, "sharding.timeout_s", self.timeout_s, "more than 0 seconds")


@dataclass(frozen=True)
class Unsharded(Neutral, Sharding):
    """One process holds everything."""

    searched = False
    needs_always = frozenset({Fact.ONE_RANK})


class DataParallel(Sharding):
    """Options that slice the logical batch over the ranks."""

    band = 2e-6
    needs_always = frozenset({Fact.MANY_RANKS})

    def caveat(self, model: nn.Module) -> str | None:
        if not any(isinstance(module, BatchNorm) for module in model.modules()):
            return None
        return "BatchNorm normalises over the samples of each rank, not over the whole batch (model.norm=group doesn't)"


@dataclass(frozen=True)
class DDP(DataParallel):
    """Every rank holds the whole model; gradients are summed during the backward pass of the last part.

    One in-place all-reduce per gradient: torch's DistributedDataParallel would hold all gradients a second time in its
    buckets, or keep their memory from step to step.
    """

    needs_always = DataParallel.needs_always | {Fact.GRADS_AT_UPDATE}

    def apply(self, rig: Rig) -> Rig:
        return replace(over_ranks(rig), sync=partial(gradients_summed, rig.model, set[str]()))


@dataclass(frozen=True)
class FSDP(DataParallel):
    """Every rank holds its shard of each weight, gradient and optimizer state. A block's weights are gathered when the
    block computes."""

    reshard_after_forward: bool = True
    reduce_every_part: bool = True

    saves = Kind.PARAMETERS
    needs_always = DataParallel.needs_always | {SEPARATE_MEMORY, REAL_WEIGHTS, SHARDABLE, STEADY_WEIGHTS}
    breaks_always = frozenset({Fact.WHOLE_PARAMS})

    def apply(self, rig: Rig) -> Rig:
        # Compiled code for one rank's shards doesn't fit another rank's, and torch 2.13's cache mixes them up.
        torch.compiler.config.cache_key_tag = f"rank {all_ranks().rank} of {all_ranks().size}"
        mesh = device_mesh(rig.device)
        accept_views()
        make_contiguous(rig.model)
        for block in rig.structure.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        model = fully_shard(rig.model, mesh=mesh)  # weights outside blocks; they stay gathered until the backward pass
        modules, lockstep = fsdp_modules(rig.model), in_lockstep(rig.model)
        gather = ReleasedAllGather if rig.device.type == "cpu" else DefaultAllGather
        for index, module in enumerate(modules):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(InStep(gather(), lockstep, index))
        forward = rig.forward if lockstep is None else partial(lockstep.forward, rig.forward)
        return replace(over_ranks(rig), forward=forward, sync=partial(self.sync, model, lockstep))

    @contextmanager
    def sync(self, model: FSDPModule, lockstep: Lockstep | None, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one part."""
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or self.reduce_every_part)
        yield
        if lockstep is not None:
            lockstep.end()


LONGEST_HOLD_S = 1.0  # whoever holds a tensor for longer intends to keep it


class ReleasedAllGather(DefaultAllGather):
    """An all-gather that returns only when nobody else holds the gathered tensor. Gloo's threads hold it for a moment
    after the wait has ended; it would then still be alive while FSDP allocates the copy, and raise the peak."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        storage = output_tensor.untyped_storage()
        before = num_holders(storage)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        until_s = time.monotonic() + LONGEST_HOLD_S
        while work is None and num_holders(storage) > before and time.monotonic() < until_s:
            time.sleep(0)
        return work


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


def over_ranks(rig: Rig) -> Rig:
    """The rig of one rank, which has a slice of the logical batch: totals and losses are summed over all ranks."""

    buffers = RankBuffers(rig.model)

    def total(parts: list[Part]) -> Tensor:
        return data_ranks().sum(rig.total(parts))

    def run(final: Rig, parts: list[Part], total: Tensor) -> Tensor:
        buffers.begin()
        loss = rig.run(final, parts, total)
        buffers.end()
        return data_ranks().sum(loss)

    return replace(rig, total=total, run=run)


@contextmanager
def gradients_summed(model: nn.Module, told: set[str], is_last: bool) -> Iterator[None]:
    """Around forward and backward of one part. For the last part of a step, sums the gradients over all ranks, mostly
    during the backward pass; when the block ends they are summed. Does nothing for other parts, since gradients
    accumulate over all parts and are sent once. Nor does it without autograd, which then computes none. A parameter
    that the forward passes of this rank haven't used counts as one with a gradient of 0, which a line says once; one
    that no rank has used gets no gradient, so that its weight stays as it is, as on one rank.

    Args:
        told: the names in that line, once it was printed.
    """
    if not is_last or not torch.is_grad_enabled():
        yield
        return
    gradients = GradientSum({each: name for name, each in model.named_parameters() if each.requires_grad})
    handles = [parameter.register_post_accumulate_grad_hook(gradients.arrived) for parameter in gradients.waiting_for]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    gradients.finish()
    if gradients.unused and not told:
        told.update(name for name, parameter in model.named_parameters() if parameter in gradients.unused)
        names = ", ".join(sorted(told))
        print(
            f"rank {all_ranks().rank}: no gradient of {names}: counted as 0, or left alone if no rank has one",
            flush=True,
        )


class GradientSum:
    """Sums gradients over ranks as they are computed, in an order on which all ranks agree.

    Args:
        names: of the parameters, in the model's order.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self.names, self.parameters, self.ranks = names, [*names], data_ranks()
        self.waiting_for = [*names]  # sent from the end: about the order in which autograd computes gradients
        self.arrivals: set[Tensor] = set()
        self.unused: set[Tensor] = set()
        self.sent: dict[Tensor, dist.Work] = {}

    def arrived(self, parameter: nn.Parameter) -> None:
        """Send this gradient, and those that have waited for it. Raises Incompatible if it has been sent: what this
        rank has added to it since may be summed over the ranks, or not."""
        if parameter in self.sent:
            raise Incompatible(
                "sharding=ddp sends each gradient as soon as a backward pass has computed it, and the one of"
                f" {self.names[parameter]} comes in several pieces, as from reentrant checkpoints around a layer that"
                " is called several times, and from a backward() in the forward pass: choose sharding=fsdp, or"
                " checkpoint(..., use_reentrant=False)"
            )
        self.arrivals.add(parameter)
        while self.waiting_for and self.waiting_for[-1] in self.arrivals:
            self.send(self.waiting_for.pop())

    def send(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            self.unused.add(parameter)
        gradient = as_real(parameter.grad)
        # Gradients have their parameter's layout, without gaps and the same on all ranks, so a flat view will do.
        flat = gradient.as_strided((gradient.numel(),), (1,))
        work = dist.all_reduce(flat, group=self.ranks.group, async_op=True)
        assert work is not None
        self.sent[parameter] = work

    def finish(self) -> None:
        """Send the gradients that only earlier parts have computed. Then wait for all: on CUDA the device waits, on a
        CPU this process."""
        while self.waiting_for:
            self.send(self.waiting_for.pop())
        for work in self.sent.values():
            work.wait()
        self.forget_unused()

    def forget_unused(self) -> None:
        """Take the gradient of 0 from each parameter that no rank has used. All ranks must call it."""
        if not self.parameters:
            return
        uses = [float(parameter not in self.unused) for parameter in self.parameters]
        numbers = self.ranks.sum(torch.tensor(uses, device=self.parameters[0].device))
        if self.unused:
            known = uses if is_fake(numbers) else numbers.tolist()
            for parameter, num_uses in zip(self.parameters, known, strict=True):
                if num_uses == 0:
                    parameter.grad = None


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
