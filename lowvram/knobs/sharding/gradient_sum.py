"""Sums of gradients over ranks, each of which computes them of its own samples or tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.config.errors import Incompatible
from lowvram.core.mesh import Ranks, gradient_ranks
from lowvram.core.shards import as_real, local


class GradientSum:
    """Sums gradients over ranks as they are computed, in an order on which all ranks agree.

    Args:
        names: of the parameters, in the model's order.
        ranks: None: those that have the same weights.
    """

    option = "ddp"  # for messages

    def __init__(self, names: Mapping[nn.Parameter, str], ranks: Ranks | None = None) -> None:
        self.names, self.parameters, self.ranks = names, [*names], ranks or gradient_ranks()
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
        self.sent.add(parameter)
        if not flat.numel():  # a shard without rows
            return
        work = dist.all_reduce(flat, group=self.ranks.group, async_op=True)
        assert work is not None
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
