"""Private names of torch's compiler. Imports no torch: the fork server asks for a module's name."""

from __future__ import annotations

from contextlib import AbstractContextManager

COMPILER_MODULE = "torch._dynamo"
"""What torch imports late, when the first optimizer is made: a second, which whoever waits can spend before.

torch._dynamo, since 2.0. Replaced by nothing, once torch.optim doesn't import it.
"""


def use_eager_random_numbers(is_on: bool = True) -> None:
    """Let compiled code draw random numbers with the kernels that eager code draws with.

    torch._inductor.config.fallback_random, since 2.0: on CUDA inductor's own make wrong dropout masks since 2.13
    (pytorch#198333). Replaced by nothing, once that is mended; the options of a call of `torch.compile` don't go
    together with a mode.
    """
    from torch._inductor import config

    config.fallback_random = is_on


def draws_eager_random_numbers() -> bool:
    """Whether compiled code draws random numbers as eager code does.

    torch._inductor.config.fallback_random, since 2.0: see `use_eager_random_numbers`. Replaced with that.
    """
    from torch._inductor import config

    return config.fallback_random


def set_activation_budget(share: float) -> None:
    """What a graph may keep for its backward pass, as a share of what the compiler would like to keep.

    torch._functorch.config.activation_memory_budget, since 2.4: torch.autograd.graph.region_activation_memory_budget,
    since 2.13, is public but has to be inside of what is compiled, which a knob leaves as it is. Replaced by that, if
    it may be around.
    """
    from torch._functorch import config

    config.activation_memory_budget = share


def activation_budget() -> float:
    """The share that `set_activation_budget` has set; 1 at first.

    torch._functorch.config.activation_memory_budget, since 2.4: see there. Replaced with that.
    """
    from torch._functorch import config

    return config.activation_memory_budget


def activation_budget_restored() -> AbstractContextManager[object]:
    """After it the share of `set_activation_budget` is what it was before.

    torch._functorch.config.patch, since 2.4 with this key: see `set_activation_budget`. Replaced with that.
    """
    from torch._functorch import config

    return config.patch(activation_memory_budget=config.activation_memory_budget)


def compile_seconds() -> float:
    """How long torch.compile has worked in this process: on graphs of both directions, again for each new shape.

    torch._dynamo.utils.calculate_time_spent, since 2.4: nothing public tells it. Replaced by a name in torch.compiler,
    if torch makes one.
    """
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]
