"""Hooks of parameters that don't keep the object that they call alive."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

from torch import nn


def when_accumulated(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
    """Call `method` with the parameter each time its gradient has been accumulated, for as long as the object of the
    method lives.

    torch holds a parameter's hooks in C++, where Python's garbage collector doesn't look. If the object of a plain hook
    holds the parameter, neither is ever freed: weights, optimizer state and gradients stay after `del rig`.
    """
    reference = WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    parameter.register_post_accumulate_grad_hook(hook)
