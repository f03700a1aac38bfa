"""Copies of third-party models in fp64 on the CPU, and what they compute there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

Call = Callable[[nn.Module, Any], Tensor]  # calls a model on inputs; returns its logits


@torch.no_grad()
def computed(call: Call, model: nn.Module, instead: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """The logits of a model with these tensors, by their names, instead of its own."""
    around = Called(model, call)
    return functional_call(around, {f"model.{name}": tensor for name, tensor in instead.items()}, (inputs,))


@final
class Called(nn.Module):
    """A model as it is called here."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, inputs: Any) -> Tensor:
        return self.call(self.model, inputs)


def fp64_copy(model: nn.Module) -> nn.Module:
    """A copy in fp64 on the CPU, in evaluation mode."""
    return rebuilt(model, in_fp64)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy whose weights have no memory, for `computed`; its buffers are in fp64."""
    return rebuilt(model, lambda weight: weight.to("meta"))


def rebuilt(model: nn.Module, weight: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {id(buffer): in_fp64(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(weight(parameter.detach()), requires_grad=False)
    return deepcopy(model, memo).eval()


def in_fp64(tensor: Tensor) -> Tensor:
    """A copy."""
    return tensor.to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
