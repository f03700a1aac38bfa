"""Parameters that rest: they don't train in the present step of a run, but do in others.

A frozen parameter has `requires_grad` false in all steps, one that rests only until it is woken.
"""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_resting = WeakIdKeyDictionary()


def rest(parameter: nn.Parameter) -> None:
    """Have autograd compute no gradient of the parameter until it is woken."""
    parameter.requires_grad_(False)
    _resting[parameter] = True


def wake(parameter: nn.Parameter) -> None:
    """The inverse of `rest`."""
    parameter.requires_grad_()
    _resting.pop(parameter, None)


def ever_trains(parameter: nn.Parameter) -> bool:
    """Whether the parameter trains at some step of the run."""
    return parameter.requires_grad or parameter in _resting
