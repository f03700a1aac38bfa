"""Causal attention of a chunk of tokens: between these and all tokens before them, of the same block.

Shapes: b samples, n heads of queries, m of keys and values, s tokens of a chunk, t of a sample, e up to the chunk's
end, c width of one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowvram.config.errors import Incompatible
from lowvram.core.attention import Kernel, as_autocast, attention_of_last

MEND = "choose data without padding, loader=bucketed, or tile=blocks"


class Span(NamedTuple):
    """The tokens of a chunk."""

    begin: int
    end: int


class AllKnown(Exception):
    """The keys and values of a chunk are known, and nothing else is wanted of it."""


@final
class Whole:
    """Keys or values of all tokens of a sample so far, (b, m, t, c), and their gradients."""

    def __init__(self, like: Tensor, num_tokens: int) -> None:
        batch, heads, _, width = like.shape
        self.shape = (batch, num_tokens, heads, width)  # as a model's own lie: a token's heads side by side
        self.values = like.new_empty(self.shape).transpose(1, 2)
        self.gradients: Tensor | None = None

    def take(self, gradient: Tensor, span: Span) -> Tensor:
        """The gradient of a chunk's own keys: what its own queries and those of all later chunks have found. The rest
        is kept for the chunks before.

        Args:
            gradient: (b, m, e, c), of all tokens up to the chunk's end.
        """
        own = gradient[:, :, span.begin :]
        if self.gradients is not None:
            own = own + self.gradients[:, :, span.begin : span.end]
        if span.begin == 0:
            return own
        if self.gradients is None:
            exact = torch.promote_types(gradient.dtype, torch.float32)
            self.gradients = torch.zeros(self.shape, dtype=exact, device=gradient.device).transpose(1, 2)
        self.gradients[:, :, : span.begin] += gradient[:, :, : span.begin]
        return own


class Joined(torch.autograd.Function):
    """A chunk's keys or values, after those of all tokens before it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, whole: Whole, span: Span) -> Tensor:
        """(b, m, s, c) to (b, m, e, c)"""
        ctx.whole, ctx.span, ctx.dtype = whole, span, own.dtype
        whole.values[:, :, span.begin : span.end] = own
        return whole.values[:, :, : span.end]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.whole.take(gradients[0], ctx.span).to(ctx.dtype), None, None


@final
class Keys:
    """Keys and values of a block's tokens so far, for each attention in it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.num_attentions = num_tokens, 0
        self.span = Span(0, 0)
        self.known: list[tuple[Whole, Whole]] = []
        self.number = 0  # of the next attention
        self.stops = False

    @contextmanager
    def at(self, span: Span, stops: bool = False) -> Iterator[None]:
        """Around a forward pass of a chunk.

        Args:
            stops: raise AllKnown as soon as no more keys and values are to come.
        """
        self.span, self.stops, self.number = span, stops, 0
        yield
        self.num_attentions = max(self.num_attentions, self.number)

    def forget(self) -> None:
        self.known = []

    def attend(
        self,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        """As `kernel`, torch's attention. What isn't causal is left as it is: a trial has shown what that is.

        Raises:
            Incompatible: there is a mask.
        """
        begin, end = self.span
        if attn_mask is not None and key.dim() == 4 and key.shape[-2] == end - begin:
            raise Incompatible(
                f"tile=tokens needs that attention has no mask, as for padding, packed rows or a window: {MEND}"
            )
        if not is_causal:
            return kernel(query, key, value, attn_mask, dropout_p, is_causal, **named)
        query, key, value = map(as_autocast, (query, key, value))
        keys, values = self.join(key, value)
        if begin == 0:
            return kernel(query, keys, values, None, dropout_p, True, **named)
        return attention_of_last(kernel, query, keys, values, dropout_p, **named)

    def join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens up to the chunk's end."""
        if self.number == len(self.known):
            self.known.append((Whole(key, self.num_tokens), Whole(value, self.num_tokens)))
        whole_key, whole_value = self.known[self.number]
        self.number += 1
        keys: Any = Joined.apply(key, whole_key, self.span)
        values: Any = Joined.apply(value, whole_value, self.span)
        if self.stops and self.number == self.num_attentions:
            raise AllKnown
        return keys, values
