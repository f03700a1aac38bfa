"""Modules whose weights are packed in a format for which torch has no dtype, such as NF4."""

from __future__ import annotations

from torch import nn


class PackedWeight(nn.Module):
    """Its buffers hold the weights, several in one element. They aren't parameters and never train."""

    num_weights: int


def num_packed(model: nn.Module) -> int:
    """The number of packed weights of a model, which its parameters don't include."""
    return sum(module.num_weights for module in model.modules() if isinstance(module, PackedWeight))
