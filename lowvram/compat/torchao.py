"""Private names of torchao."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor


def new_moment(optimizer: Any, like: Tensor, signed: bool) -> Tensor:
    """A moment (a running average of Adam), zero, as torchao's low-bit optimizers keep it: codes and scales, or plain
    numbers if the tensor is too small for blocks of codes.

    torchao.optim's _new_buffer, since 0.4 (in torchao.prototype, before 0.11): the classes of such tensors are public,
    but not which of them an optimizer uses, and when. Replaced by nothing, once its state can be made before its first
    step.

    Args:
        signed: whether values may be negative: true for the mean of gradients, false for that of their squares.
    """
    return optimizer._new_buffer(like, signed)


def part_of_moment(moment: Any, start: int, end: int) -> Any:
    """Elements `start` to `end` of a moment of codes, in one dimension. The part shares the memory of the whole and
    has whole blocks.

    The constructors of torchao.optim's OptimState8bit and OptimState4bit, by their `__tensor_unflatten__`, since 0.4:
    the classes are public, but they can't be sliced. Replaced by a slice, once they can.
    """
    names, attributes = moment.__tensor_flatten__()

    def part(name: str) -> Tensor:
        whole = getattr(moment, name).view(-1)
        first, last = (place * whole.numel() // moment.numel() for place in (start, end))
        return whole[first:last]

    inner = {name: moment.qmap if name == "qmap" else part(name) for name in names}
    sizes = [(end - start,) if isinstance(value, tuple) else value for value in attributes]
    return type(moment).__tensor_unflatten__(inner, sizes)


def set_codes(weight: Any, codes: Tensor, scale: Tensor) -> None:
    """Give a weight of few bits other codes and scales, in place.

    The attributes qdata and scale of torchao.quantization's IntxUnpackedToInt8Tensor and Int8Tensor, since 0.14: the
    classes are public, what they are made of isn't. Replaced by scales that the configurations take, once they do (they
    take a mapping, and training with weights of few bits knows the one with ties alone).

    Args:
        codes: int8, of the weight's shape.
        scale: in the order of the weight's pieces that share one.
    """
    weight.qdata.copy_(codes)
    weight.scale.copy_(scale.view_as(weight.scale))


def flattened(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict as plain tensors and metadata for a safetensors file: torchao's tensors of few bits become the
    tensors of which they are made.

    torchao.prototype.safetensors' flatten_tensor_state_dict, since 0.14: its names are public, but it is called a
    prototype. Replaced by the same function, once it moves out of there.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict(state)  # pyright: ignore[reportArgumentType]


def unflattened(tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Tensor]:
    """The inverse of `flattened`.

    torchao.prototype.safetensors' unflatten_tensor_state_dict, since 0.14; it fails (torchao 0.18) on a tensor of the
    model itself, whose name has no dot. Replaced by the same function, once it moves out of there.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    names = json.loads(metadata["tensor_names"])
    of_modules = [name for name in names if "." in name]
    own = {name: tensors[name] for name in names if "." not in name}
    state, _ = unflatten_tensor_state_dict(tensors, {**metadata, "tensor_names": json.dumps(of_modules)})
    return {**own, **state}
