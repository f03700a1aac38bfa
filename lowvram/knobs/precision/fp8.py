"""fp8: matrix products of linear layers in 8 bits, everything else under autocast to bf16. It saves time, no memory.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022); torchao.float8 with dynamic scaling: one scale per tensor,
computed anew for each product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modules import become
from lowvram.core.fact import Fact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.layers import has_own_forward, owns_weight
from lowvram.core.quiet import quiet
from lowvram.core.rig import Rig
from lowvram.core.structure import known_last_weights

MULTIPLE = 16  # tensor cores need both dimensions of a weight to be multiples of it


@dataclass(frozen=True)
class Fp8(Knob):
    """Linear layers multiply in fp8, except the head and those with a dimension that isn't a multiple of 16."""

    stage = Stage.BUILD
    product_format = "fp8"
    exactness = Exactness.LOSSY
    band = 1e-1
    libraries = ("torchao.float8",)
    needs_always = frozenset({Fact.BF16, Fact.FP8, Fact.PLAIN_PRODUCTS})
    breaks_always = frozenset({Fact.OWN_FORMAT})

    def apply(self, rig: Rig) -> Rig:
        convert(rig.model, known_last_weights(rig.structure, "precision=fp8"))
        rig.model.forward = under_autocast(rig.model.forward, rig.device.type)
        return rig


def under_autocast(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`forward` under autocast to bf16."""

    @wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            return forward(*args, **kwargs)

    return autocast_forward


def convert(model: nn.Module, last: Collection[Tensor], emulate: bool = False) -> None:
    """Have linear layers multiply in fp8; parameters, hooks and names stay. Layers whose forward pass may be another
    one than PyTorch's stay as they are.

    Args:
        last: the weights of layers that stay as they are.
        emulate: round to fp8 but multiply in another format, for devices without fp8.
    """

    def is_fit(module: nn.Module, name: str) -> bool:
        del name
        if type(module) is not nn.Linear or not owns_weight(module) or has_own_forward(module):
            return False
        is_last = any(module.weight is weight for weight in last)
        return not is_last and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0

    with quiet():
        float8 = import_module("torchao.float8")
    # Padded, as the number of tokens is the inner dimension of the weight's gradient and needn't be a multiple.
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    before = dict(model.named_modules(remove_duplicate=False))
    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_fit)
    for name, layer in before.items():
        if name and (narrow := model.get_submodule(name)) is not layer:  # torchao leaves hooks with the old one
            if type(layer) is nn.Linear:
                become(layer, narrow)
            model.set_submodule(name, layer)
