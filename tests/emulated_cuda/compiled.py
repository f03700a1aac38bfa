"""Zeros for what inductor's Triton kernels would write. Nothing runs them here, so their results would be whatever the
memory held before, and a step's gradients not finite by chance."""

from __future__ import annotations

from typing import Any

from torch import Tensor

RESULT = "out_ptr"  # how inductor names the argument of a result; `in_out_ptr` is one that it changes in place


def install(heuristics: Any) -> None:
    """Let each launch of a kernel set its results to zero.

    Args:
        heuristics: the module torch._inductor.runtime.triton_heuristics.
    """
    launch = heuristics.CachingAutotuner.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        result = launch(kernel, *args, **kwargs)
        for name, arg in zip(kernel.fn.arg_names, args, strict=False):
            if name.startswith(RESULT) and isinstance(arg, Tensor):
                arg.zero_()
        return result

    heuristics.CachingAutotuner.run = run
