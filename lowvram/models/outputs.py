"""What models return, and where among it the logits are."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput
from lowvram.config.texts import first_line


def all_outputs(model: nn.Module, inputs: Any) -> Any:
    """What the model returns. A dictionary of inputs is passed as keyword arguments. A model that itself computes
    gradients, such as forces from an energy, does so in evaluations, too.

    Raises:
        BadInput: the model can't be called with these inputs alone.
    """
    arguments, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    try:
        return model(*arguments, **named)
    except TypeError as error:
        check_call(model, arguments, named, error)
        raise
    except RuntimeError as error:
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return tree_map_only(Tensor, Tensor.detach, model(*arguments, **named))


def check_call(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], error: TypeError) -> None:
    """Raises BadInput if the signature of the model's forward pass can't take these arguments."""
    try:
        signature(model.forward).bind(*arguments, **named)
    except ValueError:  # it has no signature
        return
    except TypeError:
        given = ", ".join(named) or "one positional argument"
        allowed = f"one whose forward takes the inputs alone ({given}), since the loss is computed here"
        allowed += f": {first_line(error)}"
        raise BadInput("model", type(model).__name__, allowed) from None


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
