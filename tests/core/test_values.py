"""The tensors that are a module's own, and others in their place."""

from __future__ import annotations

import torch
from torch import nn

from lowvram.core.values import own_tensors


def test_a_modules_own_tensors_are_reported_by_all_of_their_names() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    module.other = nn.Linear(1, 1)
    module.weight = module.tied = nn.Parameter(torch.ones(3))
    names = [name for name, _ in own_tensors(module)]
    assert names == ["weight", "tied", "running_mean", "running_var", "num_batches_tracked"]


def test_what_replaces_them_is_what_the_module_computes_with() -> None:
    """An LSTM keeps a list of its parameters beside them."""
    model, inputs = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    for name, tensor in own_tensors(model):
        setattr(model, name, nn.Parameter(torch.zeros_like(tensor)))
    assert not model(inputs)[0].any()
