"""Which layers a model has: linear ones by other names, layer norms."""

from __future__ import annotations

from torch import nn

TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")  # despite its name a linear layer, with a transposed weight


def is_transposed(layer: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is (in, out), as GPT-2's are in transformers."""
    return (type(layer).__module__, type(layer).__name__) == TRANSPOSED


def layer_norms(model: nn.Module) -> list[nn.LayerNorm]:
    """Its layer norms, without classes derived from PyTorch's, whose forward pass may be another one."""
    return [module for module in model.modules() if type(module) is nn.LayerNorm]
