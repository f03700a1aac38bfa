"""A weight that embeddings share with the last layer (Press and Wolf, 2017) has only one gradient in memory.

Autograd would make a second gradient of the same size, zero except for the tokens of the batch, and add the two. Here
the last layer, which comes first in the backward pass, hands its gradient to the embedding, which adds its rows to it,
one slice of the vocabulary at a time. On a CPU results are equal to the bit; a card may add in another order.

Shapes: v classes, d width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn

from lowvram.core.lookup import Handover, HostTable, LookedUp, look_up, only_looks_up


@final
class Tie:
    """Replaces the forward pass of those embeddings of a model that share the weight of the last layer."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.handover: Handover | None = None  # of the forward pass that is running
        self.is_connected: bool | None = None  # whether autograd gets from the last layer to them; None: not known yet
        for module in model.modules():
            if only_looks_up(module) and module.weight is head.weight:
                forward, own = partial(self.look_up, module), vars(module).get("forward")
                if isinstance(own, HostTable):
                    module.forward = torch.compiler.disable(forward)  # pyright: ignore[reportAttributeAccessIssue]
                elif own is None:
                    module.forward = forward

    def look_up(self, embedding: nn.Embedding, input: Tensor) -> Tensor:
        """The forward pass of one of the embeddings."""
        weight_vd, padding = embedding.weight, embedding.padding_idx
        if torch.compiler.is_compiling():
            return nn.functional.embedding(input, weight_vd, padding)
        if not (torch.is_grad_enabled() and weight_vd.requires_grad):
            return look_up(input, weight_vd, padding)
        self.handover = self.handover or Handover()
        output: Any = LookedUp.apply(input, weight_vd, padding, self.handover)
        self.handover.nodes.append(ref(output.grad_fn))
        return output

    def handover_for(self, hidden: Tensor) -> Handover | None:
        """The handover in which the last layer may leave its gradient; None if no embedding would take it.

        Args:
            hidden: the input of the last layer, just computed.
        """
        handover, self.handover = self.handover, None
        if handover is not None and self.is_connected is None:
            self.is_connected = comes_from(hidden, handover)
        return handover if self.is_connected else None


def comes_from(tensor: Tensor, handover: Handover) -> bool:
    """Whether the backward pass from `tensor` reaches an embedding of this handover."""
    seen, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            if getattr(node, "handover", None) is handover:
                return True
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return False
