"""What a block changes, among all that it is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves


def first_tensor(arguments: Any) -> Tensor:
    """The first float among a block's arguments, in any nesting; blocks that `SameShape` finds have one."""
    return next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point())
