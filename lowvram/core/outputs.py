"""What models return, and where among it the logits are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import BadInput
from lowvram.config.texts import brief, first_line

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def all_outputs(model: nn.Module, inputs: Any) -> Any:
    """What the model returns. A dictionary of inputs is passed as keyword arguments. A model that itself computes
    gradients, such as forces from an energy, does so in evaluations, too.

    Raises:
        BadInput: the model can't be called with these inputs alone, or can't compute with whole numbers.
    """
    arguments, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    try:
        return model(*arguments, **named)
    except TypeError as error:
        check_call(model, arguments, named, error)
        raise
    except RuntimeError as error:
        check_formats(model, inputs, error)
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


def check_formats(model: nn.Module, inputs: Any, error: RuntimeError) -> None:
    """Raises BadInput if the model fails on whole numbers, and wouldn't on the same numbers as floats."""
    words = brief(str(error))
    whole = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dtype in WHOLE]
    if not whole or not re.search(r"type|[Pp]romotion|not implemented for", words):
        return
    floats = tree_map_only(Tensor, lambda each: each.float() if each.dtype in WHOLE else each, inputs)
    with torch.no_grad():
        try:
            model(**floats) if isinstance(inputs, Mapping) else model(floats)
        except Exception:  # of the model's own code: whatever it is, floats don't mend it
            return
    given = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in whole)
    allowed = f"floats for this model, which can't compute with whole numbers (torch: {words}): make them floats in the"
    raise BadInput(
        "data", given, f"{allowed} data set, such as image.float() / 255, or in the model's forward"
    ) from None


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
