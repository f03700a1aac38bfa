"""A row of ranks that split layers and, between these, have a run of each sample's tokens each (own_tokens.py).

Shapes: ... samples, t tokens of a sample, s of a rank's run, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.core.probes.runs import Told
from lowvram.core.slices import begin_of
from lowvram.knobs.sharding.row import Row

Exchange = Callable[[Tensor, Sequence[int]], Tensor]


class Way(NamedTuple):
    """How a model is called on a rank that has a run of tokens between split layers.

    Args:
        takes_all: with all tokens, of which the first block takes the rank's own; else with the rank's own ones.
        told: how it is told where those are; None: it needn't be.
    """

    takes_all: bool
    told: Told | None = None


@final
class RunsRow(Row):
    """A row whose ranks have a run of tokens each, between layers that are split.

    Args:
        row: the same, whose ranks compute all tokens.
        way: how the model is called.

    Attributes:
        num_tokens: t of the part that is computed; 0: each rank computes all tokens.
    """

    def __init__(self, row: Row, way: Way) -> None:
        self._row, self.way, self._is_in_step, self.num_tokens = row, way, False, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RunsRow:
        return self

    @property
    def rank(self) -> int:
        return self._row.rank

    @property
    def size(self) -> int:
        return self._row.size

    @property
    def sizes(self) -> list[int]:
        """How many tokens each rank has."""
        return [end - begin for begin, end in pairwise(self._begins(self.num_tokens))]

    def own_of(self, num_tokens: int) -> slice:
        """This rank's run of so many tokens."""
        begins = self._begins(num_tokens)
        return slice(begins[self.rank], begins[self.rank + 1])

    def _begins(self, num_tokens: int) -> list[int]:
        return [begin_of(num_tokens, rank, self.size) for rank in range(self.size + 1)]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a step, whose backward passes may compute again what its forward passes have."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step, self.num_tokens = False, 0

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Around the forward pass of a part, whose samples have so many tokens; 0: this rank computes them all."""
        self.num_tokens = num_tokens
        try:
            yield
        finally:
            self.num_tokens = num_tokens if self._is_in_step else 0

    def part(self, whole: nn.Parameter, dim: int, order: Tensor | None) -> nn.Parameter:
        return self._row.part(whole, dim, order)

    def read_by_all(self, x: Tensor) -> Tensor:
        """(..., s, d) to (..., t, d)"""
        if not self.num_tokens:
            return self._row.read_by_all(x)
        return Exchanged.apply(x, self.gather, self.scatter, self.sizes)

    def summed(self, x: Tensor) -> Tensor:
        """(..., t, d) to (..., s, d)"""
        if not self.num_tokens:
            return self._row.summed(x)
        return Exchanged.apply(x, self.scatter, self.gather, self.sizes)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._row.gather(x, sizes)

    def scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._row.scatter(x, sizes)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.num_tokens:
            return self._row.product(x, weight, bias)
        return product_of_all(Given(self, x), weight, bias)


@final
class InsideRow:
    """What stands for the row in layers that are given all tokens by the module that holds them, and in those that have
    whole weights."""

    def __init__(self, row: RunsRow) -> None:
        self.row = row
        self._given: list[Given] = []  # by the modules that compute, the innermost last

    def __deepcopy__(self, memo: dict[int, Any]) -> InsideRow:
        return self

    def give(self, own: Tensor) -> Tensor:
        """(..., s, d) to (..., t, d), inside `giving`."""
        self._given.append(Given(self.row, own))
        return self._given[-1].all

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Around the forward pass of a module; afterwards what it was given is forgotten."""
        num_given = len(self._given)
        try:
            yield
        finally:
            del self._given[num_given:]

    def read_by_all(self, x: Tensor) -> Tensor:
        return x if self.row.num_tokens else self.row.read_by_all(x)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.row.num_tokens:
            return self.row.product(x, weight, bias)
        given = next((each for each in self._given if each.all is x), None)
        if given is None:
            return F.linear(x, weight, bias)
        return product_of_all(given, weight, bias)


@final
class Given:
    """What split layers are given.

    Args:
        own: (..., s, d) of this rank.

    Attributes:
        all: (..., t, d) of all ranks.
    """

    def __init__(self, row: RunsRow, own: Tensor) -> None:
        self.all, self.own, self.again = row.read_by_all(own), own.detach(), Again(row)


@final
class Again:
    """The same in the backward pass, once for all layers that read it."""

    def __init__(self, row: RunsRow) -> None:
        self._row, self._sizes, self.num_readers = row, row.sizes, 0
        self._all: Tensor | None = None
        self._num_left = 0

    def read(self, own: Tensor) -> Tensor:
        """(..., t, d), kept until each layer has read it."""
        if self._all is None:
            self._all, self._num_left = self._row.gather(own, self._sizes), self.num_readers
        found = self._all
        self._num_left -= 1
        if not self._num_left:
            self._all = None
        return found


def product_of_all(given: Given, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., t, o), which a model may change in place, as it couldn't what an autograd function of our own returns."""
    made: Any = ProductOfAll.apply(given.all.flatten(0, -2), given.own, weight, bias, given.again)
    return made.view(*given.all.shape[:-1], made.shape[-1])


class ProductOfAll(torch.autograd.Function):
    """A linear layer of the tokens of all ranks: (n, i) to (n, o). It keeps a rank's own, and has them gathered once
    more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, again: Again) -> Tensor:
        again.num_readers += ctx.needs_input_grad[2]
        ctx.again, ctx.has_bias = again, bias is not None
        ctx.save_for_backward(own, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (own, weight), gradient = ctx.saved_tensors, gradients[0]
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[2]:
            return of_x, None, None, of_bias, None
        x = ctx.again.read(own.to(gradient.dtype))
        return of_x, None, gradient.t() @ x.flatten(0, -2), of_bias, None


class Exchanged(torch.autograd.Function):
    """What `there` makes of a rank's tensor, and `back` of its gradient: methods of a row, each the other's inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange, sizes: list[int]) -> Tensor:
        ctx.back, ctx.sizes = back, sizes
        return there(x, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(gradients[0], ctx.sizes), None, None, None
