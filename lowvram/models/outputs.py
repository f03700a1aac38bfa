"""What models return, and where among it the logits are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def all_outputs(model: nn.Module, inputs: Any) -> Any:
    """What the model returns. A dictionary of inputs is passed as keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def logits_of(outputs: Any) -> Any:
    """The logits among a model's outputs: a tensor itself; the entry or attribute "logits" of a dictionary, named tuple
    or any other object; else the first tensor in it, a loss (0-dim) left out."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        named: Mapping[str, Any] = outputs
    elif isinstance(logits := getattr(outputs, "logits", None), Tensor):
        return logits
    elif isinstance(outputs, tuple | list):
        named = {str(place): value for place, value in enumerate(outputs)}
    else:
        named = getattr(outputs, "__dict__", {})
    if isinstance(named.get("logits"), Tensor):
        return named["logits"]
    tensors = [value for value in named.values() if isinstance(value, Tensor)]
    return next((tensor for tensor in tensors if tensor.dim() > 0), tensors[0] if tensors else outputs)
