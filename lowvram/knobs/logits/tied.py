"""A weight that embeddings share with the last layer (Press and Wolf, 2017) has only one gradient in memory.

Autograd would make a second gradient of the same size, zero except for the tokens of the batch, and add the two. Here
the last layer, which comes first in the backward pass, hands its gradient to the embedding, which adds its rows to it,
one slice of the vocabulary at a time. On a CPU results are equal to the bit; a card may add in another order.

Shapes: v classes, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_autograd import will_run

NUMEL_AT_A_TIME = 2**22  # of a gradient: 16 MiB in fp32
dense_backward: Any = torch.ops.aten.embedding_dense_backward


@final
@dataclass(eq=False)
class Handover:
    """Hands the gradient of the last layer's weight to the embeddings. One object per forward pass of the model."""

    nodes: list[Callable[[], Any]] = field(default_factory=list)  # weak references to the embeddings' autograd nodes
    gradient_vd: Tensor | None = None  # what the last layer has left for an embedding

    def leave(self, gradient_vd: Tensor | None) -> Tensor | None:
        """Leave a gradient for an embedding that this backward pass will still reach, and return None. Return the
        gradient itself if there is no such embedding, or if another gradient waits already."""
        is_awaited = any((node := weak()) is not None and will_run(node) for weak in self.nodes)
        if self.gradient_vd is not None or not is_awaited:
            return gradient_vd
        self.gradient_vd = gradient_vd
        return None


@final
class Tie:
    """Replaces the forward pass of those embeddings of a model that share the weight of the last layer."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.handover: Handover | None = None  # of the forward pass that is running
        self.is_connected: bool | None = None  # whether autograd gets from the last layer to them; None: not known yet
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight is head.weight and is_plain(module):
                module.forward = partial(self.look_up, module)

    def look_up(self, embedding: nn.Embedding, input: Tensor) -> Tensor:
        """The forward pass of one of the embeddings."""
        weight_vd, padding = embedding.weight, embedding.padding_idx
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight_vd.requires_grad):
            return nn.functional.embedding(input, weight_vd, padding)
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


def is_plain(embedding: nn.Embedding) -> bool:
    """Whether it is an nn.Embedding that only looks rows up, with its original forward pass."""
    has_more = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return type(embedding) is nn.Embedding and not has_more and "forward" not in vars(embedding)


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


@final
class LookedUp(torch.autograd.Function):
    """An embedding look-up whose backward pass adds to the gradient that the last layer has left."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight_vd: Tensor, padding: int | None, handover: Handover) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows, ctx.padding, ctx.handover = len(weight_vd), -1 if padding is None else padding, handover
        return nn.functional.embedding(indices, weight_vd, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (indices,) = ctx.saved_tensors
        whole_vd, ctx.handover.gradient_vd = ctx.handover.gradient_vd, None
        if whole_vd is None:  # another embedding has taken it
            whole_vd = dense_backward(gradient, indices, ctx.num_rows, ctx.padding, False)
        else:
            add_rows(whole_vd, gradient, indices, ctx.padding)
        return None, whole_vd, None, None


def add_rows(whole_vd: Tensor, gradient: Tensor, indices: Tensor, padding: int) -> None:
    """Add the gradient (..., d) of the rows `indices` (...) to `whole_vd`, except those of the index `padding`."""
    first = 0
    for rows in whole_vd.split(max(1, NUMEL_AT_A_TIME // whole_vd.shape[1])):
        places = indices - first
        is_here = (places >= 0) & (places < len(rows)) & (indices != padding)
        places = places.where(is_here, len(rows))  # all others go to one more row, which is dropped
        rows.add_(dense_backward(gradient, places, len(rows) + 1, len(rows), False)[:-1])
        first += len(rows)
