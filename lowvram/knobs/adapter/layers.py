"""Layers that can carry an adapter, and how peft puts one beside each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_modules import put_around
from lowvram.core.layers import is_transposed, owns_weight
from lowvram.core.quiet import quiet
from lowvram.knobs.adapter.nf4 import Convolution, Linear, Product

NAME = "default"  # peft's name of the adapter


def library() -> Any:
    """peft, imported only when it is used, as that takes seconds."""
    with without_dispatch_modes(), quiet():
        return import_module("peft")


def product_of(layer: nn.Module) -> Product | None:
    """How a layer uses its weight; None if it can't carry an adapter. Subclasses can't, such as the layer that
    nn.MultiheadAttention holds and never calls, nor layers whose weight is computed from other parameters."""
    kind = type(layer)
    if not owns_weight(layer):
        return None
    if kind is nn.Linear or is_transposed(layer):
        return Linear(transposed=is_transposed(layer))
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d and not isinstance(layer.padding, str):
        is_plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
        return Convolution(layer.stride, layer.padding, layer.dilation, layer.groups) if is_plain else None
    return None


def layers_of(model: nn.Module, head: nn.Module | None) -> dict[str, nn.Module]:
    """All layers that can carry an adapter, by name. Not the head, whose weight is often shared with the embedding."""
    named = model.named_modules()
    return {name: layer for name, layer in named if layer is not head and product_of(layer) is not None}


def linear_or_else_all(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The linear layers; if there is none, all layers."""
    linear = {name: layer for name, layer in layers.items() if isinstance(product_of(layer), Linear)}
    return linear or dict(layers)


def put_in(model: nn.Module, layers: Mapping[str, nn.Module], options: Mapping[str, Any]) -> dict[nn.Module, nn.Module]:
    """Put an adapter beside each of the layers, and freeze everything else. The adapters' tensors have the device and
    the dtype of the layers'. A layer's own object becomes peft's, hooks included, so that code which holds the layer
    calls it with its adapter.

    Returns:
        Of each such object the plain layer in it.
    """
    peft = library()
    weight = next(iter(layers.values())).get_parameter("weight")
    with quiet(), torch.device("meta"):  # peft doesn't move what is there: a plan's tensors can't be moved
        peft.inject_adapter_in_model(config_of(layers, options), model, NAME)
    for layer in adapted(model).values():
        for matrix, start in ((layer.lora_A[NAME], as_in_peft), (layer.lora_B[NAME], nn.init.zeros_)):
            like = torch.empty_like(matrix.weight, device=weight.device, dtype=weight.dtype)
            matrix.weight = nn.Parameter(like if weight.is_meta else start(like))
        # Else, under autocast, peft casts the inputs to fp32 and autocast casts them back: a copy kept by each layer.
        layer.cast_input_dtype_enabled = False
    inner = {}
    for name, layer in layers.items():
        inner[layer] = put_around(layer, model.get_submodule(name), "base_layer")
        model.set_submodule(name, layer)
    return inner


def as_in_peft(matrix: torch.Tensor) -> torch.Tensor:
    """Matrix A's initial values, without advancing torch's generators."""
    with torch.random.fork_rng([]):
        return nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))


def config_of(layers: Mapping[str, nn.Module], options: Mapping[str, Any]) -> Any:
    """peft's configuration of adapters beside these layers."""
    is_any_transposed = any(map(is_transposed, layers.values()))
    return library().LoraConfig(target_modules=list(layers), fan_in_fan_out=is_any_transposed, **options)


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter (peft's LoraLayer), by name."""
    kind = library().tuners.lora.LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def plain_name(owner: str, layers: Collection[str]) -> str:
    """The name that a module had before its layer got an adapter."""
    layer = owner.removesuffix(".base_layer")
    return layer if layer in layers else owner
