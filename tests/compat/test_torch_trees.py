"""Private names of torch's trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.compat.sentences import needed

TREE: Any = {"a": [1, (2.5, "text")], "b": None}


@needed("torch.utils._pytree.tree_map", by="a batch")
def test_every_leaf_is_mapped() -> None:
    from lowvram.compat.torch_trees import tree_map

    assert tree_map(lambda leaf: leaf * 2, {"a": [1, (2.5, "text")]}) == {"a": [2, (5.0, "texttext")]}


@needed("torch.utils._pytree.tree_map_only", by="a batch")
def test_leaves_of_one_class_are_mapped() -> None:
    from lowvram.compat.torch_trees import tree_map_only

    assert tree_map_only(float, lambda leaf: leaf * 2, TREE) == {"a": [1, (5.0, "text")], "b": None}


@needed("torch.utils._pytree.tree_leaves", by="the ledger")
def test_leaves_come_in_order_out_of_torchs_own_containers_too() -> None:
    from lowvram.compat.torch_trees import tree_leaves

    assert tree_leaves(TREE)[:3] == [1, 2.5, "text"]
    leaves = tree_leaves(torch.max(torch.tensor([[3, 4]]), dim=1))
    assert [leaf.item() for leaf in leaves if isinstance(leaf, Tensor)] == [4, 1]


@needed("torch.utils._pytree.tree_flatten and tree_unflatten", by="accum, which cuts a batch into parts,")
def test_leaves_are_put_together_again() -> None:
    from lowvram.compat.torch_trees import tree_flatten, tree_unflatten

    leaves, form = tree_flatten(TREE)
    assert tree_unflatten(leaves, form) == TREE
