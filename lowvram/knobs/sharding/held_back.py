"""Linear layers and convolutions whose weights' gradients can be computed later than those of what they were given.

Qi et al., "Zero Bubble Pipeline Parallelism" (2023). A stage hands back the gradient of what it was given as soon as it
can, and computes those of its weights when it would wait. Until then it keeps what they are products of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight

from lowvram.compat.torch_autograd import hooks_of_tensor
from lowvram.core.attention import as_autocast
from lowvram.core.derived import named_like
from lowvram.core.layers import convolutions, has_own_forward, is_transposed, owns_weight


class Product(NamedTuple):
    """What the gradient of a weight is made of."""

    weight: Tensor
    gradient: Callable[[], Tensor]


@final
class HeldBack:
    """The products of gradients that the running backward pass leaves for later."""

    def __init__(self) -> None:
        self._products: list[Product] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldBack:
        return self

    @contextmanager
    def holding(self) -> Iterator[list[Product]]:
        """Around a backward pass; gives what it has left when it ends."""
        self._products = []
        try:
            yield self._products
        finally:
            self._products = None

    def gradient(self, product: Product) -> Tensor | None:
        """Now, or None: later."""
        if self._products is None or not isinstance(product.weight, nn.Parameter):
            return product.gradient()
        self._products.append(product)
        return None


def add_gradients(products: list[Product]) -> None:
    """Compute what was held back, as a backward pass would: each weight gets the sum of its gradients at once. The list
    is empty afterwards."""
    by_weight = dict[Tensor, list[Product]]()
    while products:
        product = products.pop()
        by_weight.setdefault(product.weight, []).append(product)
    while by_weight:
        weight, of_weight = by_weight.popitem()
        gradient = of_weight.pop().gradient()
        while of_weight:
            gradient += of_weight.pop().gradient()
        weight.backward(gradient.to(weight.dtype))


def hold_back(model: nn.Module, held: HeldBack) -> None:
    """Make its linear layers and convolutions such that gradients of their weights may come later: not where somebody
    has hooked a weight, as autograd calls hooks of gradients that it doesn't get, too."""
    known = {layer: ConvolutionParts(layer) for layer in convolutions(model) if not isinstance(layer.padding, str)}
    for module in model.modules():
        layer: Any = module
        parts = known.get(layer) or linear_parts(layer)
        if parts is not None and is_as_it_was_made(layer):
            layer.__class__, layer.parts, layer.held = holding_kind(type(layer)), parts, held


def is_as_it_was_made(layer: Any) -> bool:
    """Whether nobody has given it another forward pass, another weight, or hooks of its weight's gradient."""
    return owns_weight(layer) and not has_own_forward(layer) and not any(hooks_of_tensor(layer.weight))


class OfHeldBack:
    """What the classes below add to a layer's (`stages.OfStages`)."""

    parts: Parts
    held: HeldBack


@cache
def holding_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of layers like those of `kind` that hold back gradients."""

    class Holding(kind, OfHeldBack):
        def forward(self, input: Tensor) -> Tensor:
            x = as_autocast(input)
            made: Any = LayerInParts.apply(self.parts.read(x), self.weight, self.bias, self.parts, self.held)
            return self.parts.shaped(made, x)

    return named_like(Holding, kind)


class LayerInParts(torch.autograd.Function):
    """A layer whose backward pass leaves the gradient of its weight to `held`, if that wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts, held: HeldBack) -> Tensor:
        ctx.parts, ctx.held, ctx.weight, ctx.shape = parts, held, weight, x.shape
        as_read = as_autocast(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, as_read)
        return parts.made(x, as_read, None if bias is None else as_autocast(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), gradient, parts = ctx.saved_tensors, gradients[0], ctx.parts
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        found_x = parts.of_input(gradient, weight, ctx.shape) if of_x else None
        found_bias = parts.of_bias(gradient) if of_bias else None
        product = Product(ctx.weight, lambda: parts.of_weight(gradient, x, weight.shape))
        return found_x, ctx.held.gradient(product) if of_weight else None, found_bias, None, None


class Parts(ABC):
    """What a layer computes, and the gradients of that."""

    def read(self, x: Tensor) -> Tensor:
        """What is computed with, of what the layer is given."""
        return x

    def shaped(self, made: Tensor, x: Tensor) -> Tensor:
        """What the layer returns, given `x`."""
        del x
        return made

    @abstractmethod
    def made(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    @abstractmethod
    def of_input(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor: ...

    @abstractmethod
    def of_weight(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor: ...

    @abstractmethod
    def of_bias(self, gradient: Tensor) -> Tensor: ...


@final
class LinearParts(Parts):
    """Of (n, i) and a weight (o, i) the layer makes (n, o); transposed: of a weight (i, o)."""

    def __init__(self, is_transposed: bool) -> None:
        self._is_transposed = is_transposed

    def read(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def shaped(self, made: Tensor, x: Tensor) -> Tensor:
        """A view, which may be changed in place: autograd has made it, as it can't in a function of our own."""
        return made.view(*x.shape[:-1], made.shape[-1])

    def made(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t() if self._is_transposed else weight, bias)

    def of_input(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ (weight.t() if self._is_transposed else weight)

    def of_weight(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return x.t() @ gradient if self._is_transposed else gradient.t() @ x

    def of_bias(self, gradient: Tensor) -> Tensor:
        return gradient.sum(0)


@final
class ConvolutionParts(Parts):
    """Of (b, i, y, x) and a weight (o, i / groups, height, width)."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._options: Any = (layer.stride, layer.padding, layer.dilation, layer.groups)

    def made(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self._options)

    def of_input(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return conv2d_input(shape, weight, gradient, *self._options)

    def of_weight(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return conv2d_weight(x, shape, gradient, *self._options)

    def of_bias(self, gradient: Tensor) -> Tensor:
        return gradient.sum((0, 2, 3))


def linear_parts(layer: nn.Module) -> LinearParts | None:
    if type(layer) is nn.Linear:
        return LinearParts(False)
    return LinearParts(True) if is_transposed(layer) and not isinstance(layer, nn.Linear) else None
