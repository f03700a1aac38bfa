"""Modules whose weights are kept in a format of fewer bits than any tensor has."""

from __future__ import annotations

from torch import nn


class PackedWeight(nn.Module):
    """Its buffers hold the weights, several in one element; they are no parameters and never train."""

    num_weights: int


def num_packed(model: nn.Module) -> int:
    """How many weights a model has that are no parameters."""
    return sum(module.num_weights for module in model.modules() if isinstance(module, PackedWeight))
