"""A forward pass without memory and without values: on fake tensors, which have shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_trees import tree_map_only

T = TypeVar("T")


def fake_pass(model: nn.Module, run: Callable[[nn.Module, Any], T], inputs: Any) -> T:
    """Run a copy of the model, which is in training mode.

    Args:
        model: on any device; isn't changed.
        run: is given the copy and its inputs.
        inputs: on the CPU.
    """
    try:
        with without_dispatch_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return run(without_memory(model), tree_map_only(Tensor, mode.from_tensor, inputs))
    finally:
        clear_caches(model)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy in training mode with new, empty tensors. Call it under a FakeTensorMode: they then have no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    return deepcopy(model, memo).train()


def clear_caches(model: nn.Module) -> None:
    """Clear what functions of the model's code remember from call to call (`functools.lru_cache`). BEiT and DINOv3 of
    transformers do so with tensors: a fake one would come back in a real pass."""
    for kind in {type(module) for module in model.modules()}:
        for owner in (kind, sys.modules[kind.__module__]):
            for cached in (each for function in list(vars(owner).values()) for each in inside(function)):
                if isinstance(getattr(cached, "cache_parameters", None), Callable):
                    cached.cache_clear()


def inside(function: Any) -> Iterator[Any]:
    """A function of a module or a class, and those that it wraps."""
    function = getattr(function, "__func__", function)
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue
