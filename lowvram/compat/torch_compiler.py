"""Private names of torch's compiler. Imports torch only inside functions: the fork server only needs a module name."""

from __future__ import annotations

from contextlib import AbstractContextManager

COMPILER_MODULE = "torch._dynamo"
"""A module that torch imports when the first optimizer is made. That takes a second, so import it earlier, while
waiting.

torch._dynamo, since 2.0. Replaced by nothing, once torch.optim doesn't import it.
"""


def use_eager_random_numbers(is_on: bool = True) -> None:
    """Have compiled code draw random numbers with eager kernels.

    torch._inductor.config.fallback_random, since 2.0: on CUDA inductor's own kernels make wrong dropout masks since
    2.13 (pytorch#198333). `torch.compile(options=…)` could set it, too, but excludes `mode=`. Replaced by nothing, once
    that is fixed.
    """
    from torch._inductor import config

    config.fallback_random = is_on


def draws_eager_random_numbers() -> bool:
    """Whether compiled code draws random numbers with eager kernels.

    torch._inductor.config.fallback_random, since 2.0: see `use_eager_random_numbers`. Replaced with that.
    """
    from torch._inductor import config

    return config.fallback_random


def use_numpys_generator() -> None:
    """Have compiled code draw what it draws with numpy's functions from numpy's generator.

    torch._dynamo.config.use_numpy_random_stream, since 2.1: by default they become torch's, so that another seed
    counts. Replaced by a public option, if torch makes one.
    """
    from torch._dynamo import config

    config.use_numpy_random_stream = True


def is_making_graph() -> bool:
    """Whether torch.compile makes a graph of the running code, or traces one; False where it has left code to Python.

    torch._guards.TracingContext, since 2.0: `torch.compiler.is_compiling` knows only later versions' tracing. Replaced
    by that, once no version without it is left.
    """
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def set_activation_budget(share: float) -> None:
    """Set what a graph may save for its backward pass, as a share of what the compiler would save by default.

    torch._functorch.config.activation_memory_budget, since 2.4. torch.autograd.graph.region_activation_memory_budget,
    since 2.13, is public, but must be used inside the compiled code, which is the user's. Replaced by that, once it
    also works from outside.
    """
    from torch._functorch import config

    config.activation_memory_budget = share


def activation_budget() -> float:
    """The share that `set_activation_budget` has set; 1 by default.

    torch._functorch.config.activation_memory_budget, since 2.4: see there. Replaced with that.
    """
    from torch._functorch import config

    return config.activation_memory_budget


def activation_budget_restored() -> AbstractContextManager[object]:
    """Restores the share of `set_activation_budget` when the context ends.

    torch._functorch.config.patch, since 2.4 with this key: see `set_activation_budget`. Replaced with that.
    """
    from torch._functorch import config

    return config.patch(activation_memory_budget=config.activation_memory_budget)


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process: for forward and backward graphs, and for recompilations.

    torch._dynamo.utils.calculate_time_spent, since 2.4: there is no public name. Replaced by a name in torch.compiler,
    if torch makes one.
    """
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]
