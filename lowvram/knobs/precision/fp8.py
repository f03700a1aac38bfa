"""fp8: the products of linear layers in 8 bits, everything else as under autocast to bf16. It saves time, no memory.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022); torchao.float8, with one scale per tensor, found anew for
each product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lowvram.core.knob import Exactness, Fact, Knob, Stage
from lowvram.core.quiet import quiet
from lowvram.core.rig import Rig

MULTIPLE = 16  # of both dimensions of a matrix: what the tensor cores take


@dataclass(frozen=True)
class Fp8(Knob):
    """Linear layers multiply in fp8, but for the head and those whose dimensions don't divide by 16."""

    stage = Stage.BUILD
    product_format = "fp8"
    exactness = Exactness.LOSSY
    band = 1e-1
    libraries = ("torchao.float8",)

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.BF16, Fact.FP8})

    def apply(self, rig: Rig) -> Rig:
        convert(rig.model, rig.task.head(rig.model))
        rig.model.forward = under_autocast(rig.model.forward, rig.device.type)
        return rig


def under_autocast(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`forward` in bf16. A model without memory has it too, though there is no autocast for what it can't compute."""

    @wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            return forward(*args, **kwargs)

    return autocast_forward


def convert(model: nn.Module, head: nn.Linear | None, emulate: bool = False) -> None:
    """Replace linear layers by ones that multiply in fp8; parameters and their names stay.

    Args:
        head: stays as it is.
        emulate: compute with the numbers of fp8 in the device's own formats, for devices without.
    """

    def is_fit(module: nn.Module, name: str) -> bool:
        del name
        sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
        return module is not head and all(size % MULTIPLE == 0 for size in sizes)

    with quiet():
        float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)  # the count of tokens may be any
    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_fit)
