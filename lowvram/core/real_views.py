"""Complex parameters for optimizers: each as the real numbers that it consists of, in the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowvram.core.copies import register_copy
from lowvram.core.rig import MakeOptimizer


def with_real_views(make: MakeOptimizer) -> MakeOptimizer:
    """`make`, for parameters that may be complex. Of such a one, (...), its optimizer updates a real view, (..., 2), as
    torch's own do: so every optimizer can, and a complex number has the norm of its two parts."""

    def make_real(parameters: list[nn.Parameter]) -> Optimizer:
        views = {parameter: real_view(parameter) for parameter in parameters if parameter.is_complex()}
        optimizer = make([views.get(parameter, parameter) for parameter in parameters])

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
        if views:
            optimizer.zero_grad = forget_gradients
            optimizer.register_step_pre_hook(lend)
            optimizer.register_step_post_hook(take_back)
        return optimizer

    return make_real


def real_view(parameter: nn.Parameter) -> nn.Parameter:
    return register_copy(nn.Parameter(torch.view_as_real(parameter.detach()), parameter.requires_grad), parameter)
