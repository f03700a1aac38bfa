"""A task whose model has adapters. The tensors of the base model get the initial values of the plain task's model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core.rig import Part, Task
from lowvram.core.seeds import generator_for
from lowvram.core.structure import Structure
from lowvram.core.values import Fill
from lowvram.knobs.adapter.layers import NAME, adapted, plain_name
from lowvram.knobs.adapter.nf4 import FourBit, pack, pairs

Adapt = Callable[[Structure], None]


@final
class Adapted(Task):
    """The task `plain` with adapters in its model.

    Args:
        adapt: puts adapters into a model of the plain task.
    """

    def __init__(self, plain: Task, adapt: Adapt) -> None:
        self.plain, self.adapt = plain, adapt

    def make_model(self) -> nn.Module:
        model = self.plain.make_model()
        self.adapt(self.plain.structure(model))
        return model

    def values(self, model: nn.Module, seed: int) -> Fill:
        with torch.device("meta"):
            plain = self.plain.make_model()
        return Values(model, self.plain.values(plain, seed), seed)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return self.plain.call(model, inputs)

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        return self.plain.criterion(outputs, part)

    def num_targets(self, part: Part) -> Tensor:
        return self.plain.num_targets(part)

    def in_parts(self, num_parts: int) -> None:
        self.plain.in_parts(num_parts)

    def structure(self, model: nn.Module) -> Structure:
        return self.plain.structure(model)


@final
class Values:
    """Fills the tensors of a model with adapters, one after another.

    Adapters start as in peft, so that at first they change nothing: matrix A is random, from a generator that depends
    only on the seed and the matrix's name; matrix B is zero.
    """

    def __init__(self, model: nn.Module, fill: Fill, seed: int) -> None:
        self.fill, self.seed = fill, seed
        self.layers = set(adapted(model))
        self.quantized = {name: module for name, module in model.named_modules() if isinstance(module, FourBit)}
        self.scales: dict[str, Tensor] = {}  # by layer: computed with its codes, for its buffer `scales`

    def __call__(self, name: str, tensor: Tensor) -> None:
        owner, _, last = name.rpartition(".")
        if owner in self.quantized and last != "bias":
            self.fill_quantized(owner, last, tensor)
        elif owner.removesuffix(f".lora_A.{NAME}") in self.layers and owner.endswith(NAME):
            drawn = torch.empty(tensor.shape, device=tensor.device)
            generator = generator_for(self.seed, name, tensor.device)
            tensor.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))
        elif owner.removesuffix(f".lora_B.{NAME}") in self.layers and owner.endswith(NAME):
            tensor.zero_()
        else:
            self.fill(f"{plain_name(owner, self.layers)}.{last}".removeprefix("."), tensor)

    def without_values(self, name: str, tensor: Tensor) -> None:
        """Allocate and free what filling the tensor would take: a quantized weight is made in fp32 first."""
        owner, _, last = name.rpartition(".")
        if owner in self.quantized and last == "codes":
            pack(torch.empty(self.quantized[owner].shape, device=tensor.device))

    def fill_quantized(self, owner: str, last: str, tensor: Tensor) -> None:
        """Fill one of the buffers of a quantized layer. The buffers are filled in the order codes, scales, pairs."""
        match last:
            case "codes":
                weight = torch.empty(self.quantized[owner].shape, device=tensor.device)
                self.fill(f"{plain_name(owner, self.layers)}.weight", weight)
                packed = pack(weight)
                tensor.copy_(packed.codes)
                self.scales[owner] = packed.scales
            case "scales":
                tensor.copy_(self.scales.pop(owner))
            case _:
                tensor.copy_(pairs())
