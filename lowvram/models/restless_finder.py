"""Finds a block whose forward pass changes what it holds, or draws from other generators than torch's.

Run eagerly it can be computed again as it ran first; inside a compiled graph torch sees to its own generator alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lowvram.core.generators import OfTorch
from lowvram.core.repeat import First, Repeatable
from lowvram.models.fake_pass import fake_pass


def find_restless(
    model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, blocks: Sequence[nn.Module]
) -> str | None:
    """What the first such block does; None if there is none, or if the model can't run on fake tensors.

    Args:
        call: calls the model on inputs and returns its outputs.
        inputs: of two samples or more, on the CPU.
    """
    name_of = {module: name for name, module in model.named_modules()}
    looks: list[tuple[str, First]] = []

    def watched(copy: nn.Module, fake: Any) -> None:
        for block in blocks:
            watch(copy.get_submodule(name_of[block]), looks)
        call(copy, fake)

    try:
        fake_pass(model, watched, inputs)
    except Exception:  # it can't be compiled either, or compiling says why
        return None
    return next((what for kind, first in looks if (what := deed(kind, first)) is not None), None)


def watch(block: nn.Module, looks: list[tuple[str, First]]) -> None:
    forward, repeatable = block.forward, Repeatable(block)

    def watched(*inputs: Any, **named: Any) -> Any:
        first = repeatable.passes().first
        looks.append((type(block).__name__, first))
        with first:
            return forward(*inputs, **named)

    block.forward = watched


def deed(kind: str, first: First) -> str | None:
    """What a block did that a compiled recomputation would do twice, or otherwise."""
    drawn = [source.name for source, _ in first.drawn if not isinstance(source, OfTorch)]
    if drawn:
        return f"{kind} draws from {drawn[0]}"
    return f"{first.changes[0].what} changes in each forward pass" if first.changes else None
