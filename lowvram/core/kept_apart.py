"""Sharded tensors whose shards can't be joined, such as codes in blocks, each of which lies in one shard: they are
saved as their shards, with how these make up the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowvram.core.shards import dim_of, row_order, split_dimensions

KEPT_APART = "lowvram_kept_apart"  # an attribute of sharded tensors
SHARDS, SPLITS, ROW_ORDER = "shards", "splits", "row_order"  # the keys of what is saved of them


def keep_apart(tensor: Tensor) -> Tensor:
    """Mark a sharded tensor so that its shards are saved. All ranks must mark it, also those whose shard is of plain
    numbers."""
    if isinstance(tensor, DTensor):
        setattr(tensor, KEPT_APART, True)
    return tensor


def is_kept_apart(tensor: DTensor) -> bool:
    return getattr(tensor, KEPT_APART, False)


def saved_apart(shards: Sequence[Tensor], like: DTensor) -> dict[str, Any]:
    """What is saved of a tensor, given its shards in the order of `all_shards`."""
    return {SHARDS: list(shards), SPLITS: splits_of(like), ROW_ORDER: row_order(like)}


def splits_of(like: DTensor) -> list[list[int]]:
    """Of each dimension of the mesh that splits a tensor, the dimension of the tensor and the number of its parts."""
    mesh, places = like.device_mesh, like.placements
    return [[dim_of(places[number]), mesh.size(number)] for number in split_dimensions(like)]


def is_laid_out_as(saved: Mapping[str, Any], like: Tensor) -> bool:
    """Whether the saved shards are of the same elements as the shards of `like`."""
    if not isinstance(like, DTensor) or saved_splits(saved) != splits_of(like):
        return False
    one, other = saved.get(ROW_ORDER), row_order(like)
    return one is other if one is None or other is None else torch.equal(one.cpu(), other.cpu())


def saved_splits(saved: Mapping[str, Any]) -> list[list[int]]:
    """See `splits_of`. Early versions saved none, and could only join shards of the first dimension."""
    return saved.get(SPLITS, [[0, len(saved[SHARDS])]])


def whole_of(saved: Mapping[str, Any], shards: Sequence[Tensor]) -> Tensor:
    """The whole tensor, with its rows in their own order, of what the saved shards stand for."""
    splits, order = saved_splits(saved), saved.get(ROW_ORDER)
    entire = joined_in(shards, splits)
    return entire if order is None else entire.index_select(splits[-1][0], order.argsort().to(entire.device))


def joined_in(shards: Sequence[Tensor], splits: Sequence[Sequence[int]]) -> Tensor:
    if not splits:
        return shards[0]
    *first, (dim, num_parts) = splits  # the last dimension of a mesh splits a tensor first
    return torch.cat([joined_in(shards[part::num_parts], first) for part in range(num_parts)], dim)
