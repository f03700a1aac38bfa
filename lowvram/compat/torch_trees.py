"""Private names of torch's pytrees: tensors in any nesting of lists, dictionaries, and the outputs of models."""

from __future__ import annotations

from torch.utils import _pytree

tree_map = _pytree.tree_map
"""The same nesting, with a function applied to each leaf.

torch.utils._pytree.tree_map, since before 1.13. torch and transformers register their own containers there, which we
couldn't take apart without it. Replaced by a public module with the same, if torch makes one.
"""

tree_map_only = _pytree.tree_map_only
"""The same nesting, with a function applied to the leaves of one class.

torch.utils._pytree.tree_map_only, since before 1.13. Replaced like `tree_map`.
"""

tree_leaves = _pytree.tree_leaves
"""All leaves, in order.

torch.utils._pytree.tree_leaves, since 2.2. Replaced like `tree_map`.
"""

tree_flatten = _pytree.tree_flatten
"""All leaves, and the structure from which `tree_unflatten` rebuilds the nesting.

torch.utils._pytree.tree_flatten, since before 1.13. Replaced like `tree_map`.
"""

tree_unflatten = _pytree.tree_unflatten
"""The nesting rebuilt from leaves and the structure of `tree_flatten`.

torch.utils._pytree.tree_unflatten, since before 1.13. Replaced like `tree_map`.
"""
