"""Look-ups in a table whose gradient may be added to one that somebody else has computed, and in tables that stay in
host memory.

Shapes: v rows of the table, d width, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_autograd import will_run
from lowvram.core import host
from lowvram.core.host_weights import HostGradient, on_device
from lowvram.core.kind import Kind
from lowvram.core.shards import local
from lowvram.core.stepper import GradientSink

NUMEL_AT_A_TIME = 2**22  # of a gradient: 16 MiB in fp32
dense_backward: Any = torch.ops.aten.embedding_dense_backward


@final
@dataclass(eq=False)
class Handover:
    """Hands the gradient of the last layer's weight to the embeddings. One object per forward pass of the model."""

    nodes: list[Callable[[], Any]] = field(default_factory=list)  # weak references to the embeddings' autograd nodes
    gradient_vd: Tensor | None = None  # what the last layer has left for an embedding
    sink: GradientSink | None = None  # to which the last layer has added its gradient instead

    def leave(self, gradient_vd: Tensor | None) -> Tensor | None:
        """Leave a gradient for an embedding that this backward pass will still reach, and return None. Return the
        gradient itself if there is no such embedding, or if another gradient waits already."""
        is_awaited = any((node := weak()) is not None and will_run(node) for weak in self.nodes)
        if self.gradient_vd is not None or not is_awaited:
            return gradient_vd
        self.gradient_vd = gradient_vd
        return None


@final
class LookedUp(torch.autograd.Function):
    """An embedding look-up whose backward pass adds to the gradient that the last layer has left, or to its sink."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight_vd: Tensor, padding: int | None, handover: Handover) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows, ctx.padding, ctx.handover = len(weight_vd), -1 if padding is None else padding, handover
        ctx.table = weight_vd if host.holds(weight_vd) else None  # one of the device isn't needed any more
        return look_up(indices, weight_vd, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (indices,) = ctx.saved_tensors
        if (sink := ctx.handover.sink) is not None:
            size = sink.rows_at_a_time(max(1, NUMEL_AT_A_TIME // gradient.shape[-1]))
            for rows, piece in gradient_in_pieces(gradient, indices, ctx.padding, ctx.num_rows, size):
                sink.add(rows, piece)
            return None, None, None, None
        whole_vd, ctx.handover.gradient_vd = ctx.handover.gradient_vd, None
        if ctx.table is not None:
            whole_vd = zeros_on_host(ctx.table, gradient.device) if whole_vd is None else whole_vd
            add_rows_on_host(local(whole_vd), gradient, indices, ctx.padding)
        elif whole_vd is None:  # another embedding has taken it
            whole_vd = dense_backward(gradient, indices, ctx.num_rows, ctx.padding, False)
        else:
            add_rows(whole_vd, gradient, indices, ctx.padding)
        return None, whole_vd, None, None


@final
class HostTable:
    """The forward pass of an embedding whose table stays in host memory."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self.embedding = embedding

    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        weight_vd, padding = self.embedding.weight, self.embedding.padding_idx
        if torch.is_grad_enabled() and weight_vd.requires_grad:
            output: Any = LookedUp.apply(input, weight_vd, padding, Handover())
            return output
        return look_up(input, weight_vd, padding)


def only_looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is an nn.Embedding that does nothing but look rows up."""
    if type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def look_up(indices: Tensor, weight_vd: Tensor, padding: int | None) -> Tensor:
    """Rows of the table, on the device of the indices. Of a table in host memory only these rows go there."""
    if not host.holds(weight_vd):
        return nn.functional.embedding(indices, weight_vd, padding)
    with host.computing():
        rows_nd = local(weight_vd.detach())[indices.flatten().to(host.DEVICE)]
    return on_device(rows_nd, indices.device, Kind.ACTIVATIONS).view(*indices.shape, -1)


def add_rows(whole_vd: Tensor, gradient: Tensor, indices: Tensor, padding: int) -> None:
    """Add the gradient (..., d) of the rows `indices` (...) to `whole_vd`, except those of the index `padding`."""
    num_rows, width = whole_vd.shape
    for rows, piece in gradient_in_pieces(gradient, indices, padding, num_rows, max(1, NUMEL_AT_A_TIME // width)):
        whole_vd[rows].add_(piece)


def gradient_in_pieces(
    gradient: Tensor, indices: Tensor, padding: int, num_rows: int, rows_at_a_time: int
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of a table with `num_rows` rows, a run of rows after the other: from the gradient (..., d) of the
    rows `indices` (...), except those of the index `padding`."""
    for first in range(0, num_rows, rows_at_a_time):
        size = min(rows_at_a_time, num_rows - first)
        places = indices - first
        is_here = (places >= 0) & (places < size) & (indices != padding)
        places = places.where(is_here, size)  # all others go to one more row, which is dropped
        yield slice(first, first + size), dense_backward(gradient, places, size + 1, size, False)[:-1]


def zeros_on_host(weight_vd: Tensor, device: torch.device) -> Tensor:
    whole_vd = HostGradient(weight_vd, device).whole
    with host.computing():
        local(whole_vd).zero_()
    return whole_vd


def add_rows_on_host(whole_vd: Tensor, gradient: Tensor, indices: Tensor, padding: int) -> None:
    """`add_rows` to a gradient in host memory. The device first sums the gradients of equal tokens: it leaves each sum
    where the first of them stands, in fp32 or wider, and zeros where the others do. So the host adds few rows."""
    gradient_nd, indices_n = gradient.flatten(0, -2), indices.flatten()
    sorted_n, order_n = indices_n.sort(stable=True)
    firsts_n = torch.searchsorted(sorted_n, sorted_n)
    exact_nd = gradient_nd[order_n].to(torch.promote_types(gradient.dtype, torch.float32))
    exact_nd.masked_fill_((sorted_n == padding)[:, None], 0)
    sums_nd = dense_backward(exact_nd, firsts_n, len(firsts_n), -1, False).to(whole_vd.dtype)
    with host.computing():
        whole_vd.index_add_(0, sorted_n.to(host.DEVICE), sums_nd.to(host.DEVICE))
