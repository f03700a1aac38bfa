"""bf16_pure: weights, gradients and activations in bf16, and no fp32 copy of the weights anywhere.

What makes it train is that updates are rounded stochastically: Zamirai et al., "Revisiting BFloat16 Training" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compat.torch_modules import BatchNorm, unsaved_buffers
from lowvram.compat.torch_trees import tree_map
from lowvram.core.knob import Exactness, Fact, Kind, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.rounding import stochastically
from lowvram.core.values import own_tensors


@dataclass(frozen=True)
class Bf16Pure(Knob):
    """The model in bf16. Optimizers compute their updates in fp32 and round them into it stochastically."""

    stage = Stage.BUILD
    product_format = "bf16"
    exactness = Exactness.LOSSY
    band = 2e-2
    saves = Kind.PARAMETERS

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.BF16})

    def remedies(self) -> Mapping[Kind, int]:
        return {Kind.PARAMETERS: 10}

    def improves_on(self, in_use: Knob) -> bool:
        return in_use.exactness is not Exactness.LOSSY

    def apply(self, rig: Rig) -> Rig:
        narrow(rig.model)
        rig.model.register_forward_pre_hook(with_narrow_inputs, with_kwargs=True)
        return replace(rig, rounding=stochastically)


def narrow(model: nn.Module) -> None:
    """Turn floating-point parameters and buffers into bf16; tied ones stay tied.

    Running statistics stay fp32: bf16 would stop averaging. So do buffers that aren't saved: what they hold is computed
    from numbers, such as the frequencies of rotary positions, and their model widens what it multiplies them with.
    """
    done: dict[Tensor, Tensor] = {}
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        staying = buffers if "running_var" in buffers else unsaved_buffers(module)
        for name, tensor in own_tensors(module):
            if name not in staying and tensor.is_floating_point():
                if tensor not in done:
                    done[tensor] = narrowed(tensor)
                setattr(module, name, done[tensor])
        if isinstance(module, BatchNorm):
            module.forward = partial(batch_norm, module)


def narrowed(tensor: Tensor) -> Tensor:
    values = tensor.detach().to(torch.bfloat16)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def with_narrow_inputs(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A hook before the model's forward pass: images and the like become bf16, numbers of tokens stay."""
    del model
    return tree_map(
        lambda value: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value,
        (inputs, named),
    )


def batch_norm(norm: BatchNorm, input: Tensor) -> Tensor:
    """nn.BatchNorm's forward pass, its weights widened: kernels want them in the format of the statistics."""
    share = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if share is None else share
    weight, bias = (None if tensor is None else tensor.float() for tensor in (norm.weight, norm.bias))
    by_batch = norm.training or norm.running_mean is None
    return F.batch_norm(input, norm.running_mean, norm.running_var, weight, bias, by_batch, share or 0.0, norm.eps)
