"""Saves trained adapters in peft's layout, or merges them into the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowvram.core.values import own_tensors
from lowvram.knobs.adapter.layers import NAME, adapted, plain_name
from lowvram.knobs.adapter.nf4 import FourBit

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of all tensor names in peft's files
MATRICES = ("lora_A", "lora_B")


def write(model: nn.Module, folder: Path, config: Any, full: Mapping[str, nn.Module]) -> None:
    """Write `folder`/adapter_config.json and `folder`/adapter_model.safetensors.

    Args:
        config: peft's.
        full: layers that train fully, without an adapter, by name.
    """
    config.save_pretrained(str(folder))
    tensors = {f"{PREFIX}{name}": tensor.detach().cpu().clone() for name, tensor in trained(model, full)}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, str(folder / WEIGHTS), metadata={"format": "pt"})


@torch.no_grad()
def read(model: nn.Module, folder: Path, full: Mapping[str, nn.Module]) -> None:
    """The inverse of `write`."""
    saved = load_file(str(folder / WEIGHTS))
    for name, tensor in trained(model, full):
        tensor.copy_(saved[f"{PREFIX}{name}"])


def trained(model: nn.Module, full: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that train, by their names in peft's files."""
    for name, layer in adapted(model).items():
        for matrix in MATRICES:
            yield f"{name}.{matrix}.weight", getattr(layer, matrix)[NAME].weight
    for name, layer in full.items():
        for inner, tensor in layer.state_dict().items():
            yield f"{name}.{inner}", tensor


@torch.no_grad()
def plain_values(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same, by its own names: adapters merged, quantized weights in
    fp32."""
    layers, values = adapted(model), dict[str, Tensor]()
    for owner, module in model.named_modules(remove_duplicate=False):
        inside = plain_name(owner, layers)
        if any(owner.endswith(f".{matrix}.{NAME}") and owner.rsplit(".", 2)[0] in layers for matrix in MATRICES):
            continue
        tensors = own_tensors(module)
        if isinstance(module, FourBit):
            tensors = [("weight", module.dequantized()), *module.named_parameters(recurse=False)]
        for name, tensor in tensors:
            values[f"{inside}.{name}".removeprefix(".")] = tensor.detach()
    for name, layer in layers.items():
        weight, change = values[f"{name}.weight"], layer.get_delta_weight(NAME)
        values[f"{name}.weight"] = (weight.float() + change.float()).to(change.dtype)
    return values
