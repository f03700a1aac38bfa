"""Hooks of parameters that don't keep the object that they call alive."""

from __future__ import annotations

from types import MethodType
from weakref import ref

from torch import nn

from lowvram.compat.torch_autograd import hooks_of_tensor


def when_accumulated(parameter: nn.Parameter, method: MethodType) -> None:
    """Call `method` with the parameter each time its gradient has been accumulated, for as long as the object of the
    method lives.

    torch holds a parameter's hooks in C++, where Python's garbage collector doesn't look. If the object of a plain hook
    holds the parameter, neither is ever freed: weights, optimizer state and gradients stay after `del rig`.
    """
    reference, function = ref(method.__self__), method.__func__  # called more often, and faster, than a WeakMethod

    def hook(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            function(alive, parameter)

    parameter.register_post_accumulate_grad_hook(hook)


def run_hooks(parameter: nn.Parameter) -> None:
    """Call what is to be called when a gradient has been accumulated, for one that autograd hasn't put there."""
    _, hooks = hooks_of_tensor(parameter)
    for hook in [*(hooks or {}).values()]:
        hook(parameter)
