"""Copies that stand for parameters."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from lowvram.core.copies import original, register_copy


def test_a_copy_is_known_by_its_original() -> None:
    parameter, copy = (nn.Parameter(torch.ones(2)) for _ in range(2))
    assert register_copy(copy, parameter) is copy
    assert original(copy) is parameter
    assert original(parameter) is parameter


def test_a_copy_that_is_gone_holds_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    register_copy(nn.Parameter(torch.ones(2)), parameter)
    gone = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert gone() is None
