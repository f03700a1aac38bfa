"""Finds the blocks whose output looks as their input does, so that the model can go on without one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.probes.calls import Use, is_per_sample, uses_of
from lowvram.core.structure import Probe, Structure


@final
@dataclass(frozen=True)
class SameShape(Probe[dict[str, int]]):
    """The names of the blocks that return a tensor (samples, ...) of the shape and dtype of the first one that they are
    given, and how many values each returns, as `SeparateBlocks` counts them. Empty if they aren't known."""

    def find(self, known: Structure) -> dict[str, int]:
        name_of = {module: name for name, module in known.model.named_modules()}
        names = [name_of[block] for block in known.blocks]
        try:
            uses = uses_of(known.model, known.call, known.short_example(2), names)
        except Exception:  # of code that we don't know: its blocks aren't known
            return {}
        found = {name: uses[name] for name in names if name in uses and keeps_shape(uses[name])}
        return {name: 0 if isinstance(use.output, Tensor) else len(use.output) for name, use in found.items()}


LEAVE_DEPTH = "not known of this model: leave depth=none"


def keeps_shape(use: Use) -> bool:
    """Whether a block returned one tensor, with a row for each of two samples and of the shape and dtype of the first
    float that it was given, and nothing else but None."""
    first, *others = use.output if isinstance(use.output, tuple) else [use.output]
    given = next((leaf for leaf in use.leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    is_one = isinstance(first, Tensor) and all(other is None for other in others)
    is_like = is_one and given is not None and (first.shape, first.dtype) == (given.shape, given.dtype)
    return is_like and is_per_sample(first, 2)


def first_tensor(arguments: Any) -> Tensor:
    """The first float among a block's arguments, in any nesting; blocks that `SameShape` finds have one."""
    return next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point())
