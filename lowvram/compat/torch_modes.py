"""Private names of torch's dispatch modes, which see every operator that runs inside them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base class of modes that see, and may replace, every operator that runs inside them, below autograd.

torch.utils._python_dispatch.TorchDispatchMode, since 1.13 with the methods that we use: torch's own tutorials use it.
Replaced by a public module with the same class, if torch makes one.
"""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor wraps others, which its `__tensor_flatten__` names: shards, low-bit states. (torch's own function
without a wrapper, since a ledger calls it for every tensor.)

torch.utils._python_dispatch.is_traceable_wrapper_subclass, since 2.1: the protocol that it checks is documented, the
check isn't. Replaced by a public name, if torch makes one.
"""


class FastDispatchMode(TorchDispatchMode):
    """A dispatch mode without the guard by which torch supports torch.compile inside modes: the guard takes a large
    part of a small operator's time. Inside this mode nothing may be compiled.

    TorchDispatchMode._should_skip_dynamo, since 2.11. torch calls it a temporary measure: replaced by nothing, once the
    guard is gone.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class CountingMode(TorchDispatchMode):
    """A dispatch mode that also sees higher-order operators, and compiled code as one operator.

    TorchDispatchMode.supports_higher_order_operators, since 2.4, and ignore_compile_internals, since 2.8: torch's own
    selective checkpointing sets them. Replaced by public names, if torch makes them.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def is_in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active: a trace, a ledger.

    torch._C._len_torch_dispatch_stack, since 2.0. Replaced by a public name, if torch makes one.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Inside it no dispatch mode is active.

    torch.utils._python_dispatch._disable_current_modes, since 2.0: some libraries raise under a mode, or cache tensors
    that they made under it. Where none is active it isn't called, as it takes longer than a small operator. Replaced by
    a public name, if torch makes one.
    """
    return _python_dispatch._disable_current_modes() if is_in_dispatch_mode() else nullcontext()


def without_function_modes() -> AbstractContextManager[object]:
    """Inside it functions of torch's that Python code calls aren't shown to modes of functions, nor to tensors.

    torch._C.DisableTorchFunction, since 1.13 (modes: since 2.0). Replaced by a public name, if torch makes one.
    """
    return torch._C.DisableTorchFunction()
