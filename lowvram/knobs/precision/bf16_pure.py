"""bf16_pure: weights, gradients and activations in bf16, without an fp32 copy of the weights.

Updates are rounded stochastically, without which training stalls: Zamirai et al., "Revisiting BFloat16 Training"
(2020).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_modules import BatchNorm, unsaved_buffers
from lowvram.compat.torch_trees import tree_map
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.layers import has_own_forward
from lowvram.core.misfits import of_format
from lowvram.core.places import is_batch_norm
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.references import aliases
from lowvram.core.rig import Rig
from lowvram.core.rounding import Rounding, Split, Stochastic
from lowvram.core.values import own_tensors


@dataclass(frozen=True)
class Bf16Weights(Knob, ABC):
    """The model in bf16. Optimizers compute their updates in fp32."""

    stage = Stage.BUILD
    product_format = "bf16"
    exactness = Exactness.LOSSY
    band = 2e-2
    saves = Kind.PARAMETERS
    misfits: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (of_format("BFloat16"), r"mixed dtype \(CPU\)"),
        "the model's own code computes with weights in bf16: choose precision=bf16, or fp32",
    )
    # One weight at a time is updated in fp32.
    needs_always = frozenset({Fact.BF16, Fact.SEPARATE_UPDATES, SEPARATE_MEMORY, REAL_WEIGHTS})
    breaks_always = frozenset({Fact.FP32_WEIGHTS})

    def improves_on(self, in_use: Knob) -> bool:
        return in_use.exactness is not Exactness.LOSSY

    def apply(self, rig: Rig) -> Rig:
        to_bf16(rig.model)
        rig.model.register_forward_pre_hook(with_bf16_inputs, with_kwargs=True)
        return replace(rig, rounding=self.rounding())

    @abstractmethod
    def rounding(self) -> Rounding:
        """How the new weights are rounded."""


@dataclass(frozen=True)
class Bf16Pure(Bf16Weights):
    """Weights are rounded stochastically."""

    remedy = (Kind.PARAMETERS, 10)

    def rounding(self) -> Rounding:
        return Stochastic()


def to_bf16(model: nn.Module) -> None:
    """Cast floating-point parameters and buffers to bf16; tied ones stay tied.

    Running statistics stay in fp32, since a running average in bf16 would stop changing. So do buffers that aren't
    saved: they hold constants, such as the frequencies of rotary positions, which models use in fp32.
    """
    held = aliases(model)
    owners = [
        (each, owner) for owner in [*model.parameters(), *model.buffers()] for each in held if in_one(each, owner)
    ]
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        staying = buffers if "running_var" in buffers else unsaved_buffers(module)
        if isinstance(module, BatchNorm):
            if has_own_forward(module) or not is_batch_norm(module):
                continue  # code of others computes as under autocast: with a weight in fp32
            module.forward = partial(batch_norm, module)
        for name, tensor in own_tensors(module):
            if name not in staying and tensor.is_floating_point():
                cast_in_place(tensor)
    for each, owner in owners:
        if owner.dtype is torch.bfloat16 is not each.dtype:
            place = each.storage_offset() - owner.storage_offset()
            each.data = owner.detach().as_strided(each.shape, each.stride(), place)


def in_one(held: Tensor, owner: Tensor) -> bool:
    """Whether a tensor that the model holds is in a parameter's or a buffer's memory, which has nothing else in it."""
    memory = owner.untyped_storage()
    return held.untyped_storage() is memory and memory.nbytes() == owner.nbytes and held.dtype is owner.dtype


def cast_in_place(tensor: Tensor) -> None:
    """Cast a tensor to bf16. It stays the same object, so that its hooks stay, and whoever holds it."""
    is_bare = tensor.is_meta and not is_fake(tensor)
    with without_dispatch_modes() if is_bare else nullcontext():  # else a plan's would make a fake tensor of it
        tensor.data = tensor.data.to(torch.bfloat16)


def with_bf16_inputs(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A hook before the model's forward pass: casts floating-point inputs, such as images, to bf16."""
    del model
    return tree_map(
        lambda value: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value,
        (inputs, named),
    )


def batch_norm(norm: BatchNorm, input: Tensor) -> Tensor:
    """nn.BatchNorm's forward pass, with weight and bias cast to fp32: kernels need them in the statistics' dtype."""
    share = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if share is None else share
    weight, bias = (None if tensor is None else tensor.float() for tensor in (norm.weight, norm.bias))
    by_batch = norm.training or norm.running_mean is None
    return F.batch_norm(input, norm.running_mean, norm.running_var, weight, bias, by_batch, share or 0.0, norm.eps)


@final
@dataclass(frozen=True)
class Bf16Split(Bf16Weights):
    """A weight and its correction together are a number of 24 or 32 bits: updates don't get lost, and have no noise."""

    correction_bits: int = 8

    # Who writes into a weight knows nothing of its correction.
    needs_always = Bf16Weights.needs_always | {STEADY_WEIGHTS}
    breaks_always = Bf16Weights.breaks_always | {Fact.UNSPLIT_WEIGHTS}

    def __post_init__(self) -> None:
        require(self.correction_bits in (8, 16), "precision.correction_bits", self.correction_bits, "8 or 16")

    def rounding(self) -> Rounding:
        return Split(self.correction_bits)
