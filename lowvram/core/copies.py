"""Parameters that take the place of the model's own. An optimizer updates fp32 copies in host memory, and real views of
complex ones; a model computes with the device's copies of weights that wait on the host.

Of a complex parameter, (...), an optimizer updates a real view, (..., 2), as torch's own do: so every optimizer can,
and a complex number has the norm of its two parts.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

_originals: MutableMapping[Tensor, nn.Parameter] = WeakIdKeyDictionary()


def register_copy(copy: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Remember which parameter of the model `copy` replaces, and return `copy`. Optimizers that treat some weights
    specially look at the original."""
    _originals[copy] = original
    return copy


def original(parameter: Tensor) -> Tensor:
    """The model's own parameter behind a copy; any other tensor itself."""
    return _originals.get(parameter, parameter)


def real_views(parameters: list[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    """The view of each complex parameter."""
    return {parameter: real_view(parameter) for parameter in parameters if parameter.is_complex()}


def lend_gradients(optimizer: Optimizer, views: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Give the views, which the optimizer updates, the gradients of their parameters for each step."""

    def lend(*_: Any) -> None:
        for parameter, view in views.items():
            view.grad = None if parameter.grad is None else torch.view_as_real(parameter.grad)

    def take_back(*_: Any) -> None:
        for view in views.values():
            view.grad = None

    def forget_gradients(set_to_none: bool = True) -> None:
        forget(set_to_none)
        for parameter in views:
            parameter.grad = None

    forget = optimizer.zero_grad
    optimizer.zero_grad = forget_gradients
    optimizer.register_step_pre_hook(lend)
    optimizer.register_step_post_hook(take_back)


def real_view(parameter: nn.Parameter) -> nn.Parameter:
    return register_copy(nn.Parameter(torch.view_as_real(parameter.detach()), parameter.requires_grad), parameter)
