"""sharding=ddp.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.config.errors import Incompatible
from lowvram.core.fact import Fact
from lowvram.core.mesh import all_ranks, target_ranks
from lowvram.core.rig import Rig
from lowvram.core.shards import as_real, local
from lowvram.knobs.sharding.base import over_ranks
from lowvram.knobs.sharding.in_rows import InRows


@dataclass(frozen=True)
class DDP(InRows):
    """Every rank holds the whole model; gradients are summed during the backward pass of the last part.

    One in-place all-reduce per gradient: torch's DistributedDataParallel would hold all gradients a second time in its
    buckets, or keep their memory from step to step.
    """

    needs_always = InRows.needs_always | {Fact.GRADS_AT_UPDATE}
    breaks_always = frozenset({Fact.OWN_SHARE})

    def apply(self, rig: Rig) -> Rig:
        if target_ranks().size > 1:
            rig = replace(over_ranks(rig), sync=partial(gradients_summed, rig.model, set[str]()))
        return self.in_rows(rig)


class GradientSum:
    """Sums gradients over ranks as they are computed, in an order on which all ranks agree.

    Args:
        names: of the parameters, in the model's order.
    """

    option = "ddp"  # for messages

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self.names, self.parameters, self.ranks = names, [*names], target_ranks()
        self.waiting_for = [*names]  # sent from the end: about the order in which autograd computes gradients
        self.arrivals: set[Tensor] = set()
        self.unused: set[Tensor] = set()
        self.sent: set[Tensor] = set()
        self.works: list[dist.Work] = []  # each keeps its tensors, in gloo also after it has ended

    def arrived(self, parameter: nn.Parameter) -> None:
        """Send this gradient, and those that have waited for it. Raises Incompatible if it has been sent: what this
        rank has added to it since may be summed over the ranks, or not."""
        if parameter in self.sent:
            raise Incompatible(
                f"sharding={self.option} sends each gradient as soon as a backward pass has computed it, and the one of"
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
        gradient = as_real(local(parameter.grad))
        # Gradients have their parameter's layout, without gaps and the same on all ranks, so a flat view will do.
        flat = gradient.as_strided((gradient.numel(),), (1,))
        work = dist.all_reduce(flat, group=self.ranks.group, async_op=True)
        assert work is not None
        self.sent.add(parameter)
        self.works.append(work)

    def finish(self) -> None:
        """Send the gradients that only earlier parts have computed. Then wait for all: on CUDA the device waits, on a
        CPU this process."""
        while self.waiting_for:
            self.send(self.waiting_for.pop())
        for work in self.works:
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
                    self.forget(parameter)

    def forget(self, parameter: Tensor) -> None:
        """Take its gradient of 0 from a parameter."""
        parameter.grad = None


MakeSum = Callable[[Mapping[nn.Parameter, str]], GradientSum]


@contextmanager
def gradients_summed(model: nn.Module, told: set[str], is_last: bool, make: MakeSum = GradientSum) -> Iterator[None]:
    """Around forward and backward of one part. For the last part of a step, sums the gradients over all ranks, mostly
    during the backward pass; when the block ends they are summed. Does nothing for other parts, since gradients
    accumulate over all parts and are sent once. Nor does it without autograd, which then computes none. A parameter
    that the forward passes of this rank haven't used counts as one with a gradient of 0, which a line says once; one
    that no rank has used gets no gradient, so that its weight stays as it is, as on one rank.

    Args:
        told: the names in that line, once it was printed.
        make: makes the sum of some parameters' gradients, by their names.
    """
    if not is_last or not torch.is_grad_enabled():
        yield
        return
    gradients = make({each: name for name, each in model.named_parameters() if each.requires_grad})
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
