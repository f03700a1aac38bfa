"""sharding=ddp.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from lowvram.core.fact import Fact
from lowvram.core.mesh import all_ranks, gradient_ranks, target_ranks
from lowvram.core.rig import Rig
from lowvram.knobs.sharding.base import over_ranks
from lowvram.knobs.sharding.gradient_sum import GradientSum
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
            rig = over_ranks(rig)
        if gradient_ranks().size > 1:
            rig = replace(rig, sync=partial(gradients_summed, rig.model, set[str]()))
        return self.in_rows(rig)


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
