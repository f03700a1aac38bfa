"""Private names of torch's dispatch modes, which see every operator that runs inside them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils import _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of classes that see, and may replace, every operator that runs inside a block, below autograd.

torch.utils._python_dispatch.TorchDispatchMode, since 1.13 with the methods that we use: torch's own tutorials use it.
Replaced by a public module with the same class, if torch makes one.
"""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor only stands for others, which its `__tensor_flatten__` names: shards, low-bit states. (torch's own
function, not one around it: a ledger asks for every tensor.)

torch.utils._python_dispatch.is_traceable_wrapper_subclass, since 2.1: the protocol that it looks for is documented, the
question isn't. Replaced by a public name, if torch makes one.
"""


class FastDispatchMode(TorchDispatchMode):
    """A mode whose operators aren't guarded against torch.compile, in which nothing may be compiled: the guard takes a
    large part of the time of a small operator.

    TorchDispatchMode._should_skip_dynamo, since 2.11. torch calls it a temporary measure: replaced by nothing, once the
    guard is gone.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def modes_lifted() -> AbstractContextManager[object]:
    """Inside it operators run as if no dispatch mode was at work.

    torch.utils._python_dispatch._disable_current_modes, since 2.0: some libraries raise under a mode, or keep what they
    have made under it. Replaced by a public name, if torch makes one.
    """
    return _python_dispatch._disable_current_modes()
