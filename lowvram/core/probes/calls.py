"""How a model calls its blocks: recorded in a forward pass on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_flatten
from lowvram.core.probes.fake_pass import fake_pass


def is_per_sample(value: Any, num_samples: int) -> bool:
    """Whether an argument of a block has a row for each of `num_samples` samples. Others, such as a mask of causal
    attention or the angles of positions, are the same for all samples: their first size is 1, or they have one
    dimension."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == num_samples


class Use(NamedTuple):
    """How a block was called: its arguments as leaves, fake, and their nesting; what it returned."""

    leaves: Sequence[Any]
    nesting: Any
    output: Any


def uses_of(
    model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, names: Iterable[str], guesses: bool = False
) -> dict[str, Use]:
    """How one forward pass calls the blocks; of one that is called several times, the last time."""
    return dict(calls_of(model, call, inputs, names, guesses))


def calls_of(
    model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, names: Iterable[str], guesses: bool = False
) -> list[tuple[str, Use]]:
    """The calls of the blocks in one forward pass, in their order.

    Args:
        guesses: as `fake_pass` takes it.
    """
    calls: list[tuple[str, Use]] = []

    def watched(copy: nn.Module, fake: Any) -> None:
        for name in names:
            watch(copy.get_submodule(name), name, calls)
        call(copy, fake)

    fake_pass(model, watched, inputs, guesses=guesses)
    return calls


def watch(block: nn.Module, name: str, calls: list[tuple[str, Use]]) -> None:
    forward = block.forward

    @wraps(forward)
    def watched(*inputs: Any, **named: Any) -> Any:
        output = forward(*inputs, **named)
        calls.append((name, Use(*tree_flatten((inputs, named)), output)))
        return output

    block.forward = watched
