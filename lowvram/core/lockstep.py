"""Keeps ranks that shard a model in step. Collectives of FSDP2 meet in the order in which each rank starts them,
whatever is in them: ranks that start different ones would mix weights or gradients of different layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, final

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowvram.compat.torch_distributed import before_reductions
from lowvram.config.errors import Incompatible
from lowvram.core.mesh import Ranks, gradient_ranks


class Deed(IntEnum):
    """What a rank is about to do."""

    GATHERS = 0
    REDUCES = 1
    ENDS = 2


@final
class Lockstep:
    """Before each collective of FSDP2 the ranks compare what it is for. Before gradients are reduced they also tell one
    another which parameters have one: a parameter with a gradient on some ranks only gets zeros on the others.

    A rank waits for the hosts of the others there, not for a device.
    """

    def __init__(self, model: nn.Module, hosts: Ranks) -> None:
        self.hosts = hosts
        sharded = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        self.names = [name or "what belongs to no block" for name, _ in sharded]
        sizes = [before_reductions(each, partial(self.agreed, index)) for index, (_, each) in enumerate(sharded)]
        self.num_flags = max(sizes)

    def agreed(self, index: int, has_gradient: Sequence[bool]) -> list[bool]:
        """Whether any rank has a gradient, of each parameter that trains of the module with this index."""
        return self.meet(index, Deed.REDUCES, has_gradient)[: len(has_gradient)]

    def forward(self, forward: Callable[[Any], Any], part: Any) -> Any:
        """A forward pass that all ranks end together."""
        outputs = forward(part)
        self.end()
        return outputs

    def end(self) -> None:
        """Called after a pass over all blocks."""
        self.meet(0, Deed.ENDS)

    def meet(self, index: int, deed: Deed, flags: Sequence[bool] = ()) -> list[bool]:
        """Wait for all ranks; returns which flags are set on any. Raises Incompatible if they are about to do different
        things."""
        code = len(Deed) * index + deed
        padded = [*map(int, flags), *[0] * (self.num_flags - len(flags))]
        last, minus_first, *anywhere = self.hosts.largest([code, -code, *padded])
        if last != -minus_first:
            raise Incompatible(
                "sharding=fsdp needs that all ranks compute the same blocks in the same order, and one rank"
                f" {self.named(-minus_first)} while another {self.named(last)}: let the model compute every block for"
                " whatever samples, or choose sharding=ddp"
            )
        return [bool(flag) for flag in anywhere]

    def named(self, code: int) -> str:
        """What a rank is about to do, in words."""
        index, deed = divmod(code, len(Deed))
        words = {
            Deed.GATHERS: f"computes {self.names[index]}",
            Deed.REDUCES: f"has the gradients of {self.names[index]}",
            Deed.ENDS: "is through",
        }
        return words[Deed(deed)]


def in_lockstep(model: nn.Module) -> Lockstep | None:
    """The lockstep of a model that FSDP2 shards; None where there are no other ranks to meet. A collective: all ranks
    must call it."""
    hosts = gradient_ranks().on_hosts()
    return None if hosts is None else Lockstep(model, hosts)
