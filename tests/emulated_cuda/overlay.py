"""CPU tensors over the memory of CUDA tensors: the emulated device's memory is host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

LOW = {torch.bfloat16, torch.float16}


def over(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory, of the same shape and strides."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    raw = (ctypes.c_uint8 * (span * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)


def is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def on_cpu(value: Any) -> Any:
    """An operator's argument for the CPU kernel."""
    if isinstance(value, Tensor):
        return over(value) if value.device.type == "cuda" and is_strided(value) else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value  # then the CPU's default generator is used


def in_fp32(value: Any) -> Any:
    """A 16-bit tensor in fp32, for operators that the CPU doesn't have in 16 bits."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def as_tensor(value: Any, others: list[Tensor]) -> Any:
    """A Python number that the dispatcher had unwrapped from a tensor: a tensor again, of a dtype that doesn't change
    the dtype of the result."""
    if not isinstance(value, bool | int | float | complex):
        return value
    other = others[0] if others else None
    if other is None or isinstance(value, complex):
        return torch.tensor(value)
    if isinstance(value, float):
        is_floating = other.dtype.is_floating_point or other.dtype.is_complex
        inexact = other.dtype if other.dim() == 0 else torch.float64
        return torch.tensor(value, dtype=inexact if is_floating else torch.get_default_dtype())
    is_number = other.dim() == 0 and not isinstance(value, bool) and other.dtype != torch.bool
    return torch.tensor(value, dtype=other.dtype if is_number else None)


def write(to: Tensor, value: Tensor) -> None:
    """Copy the CPU's result into `to`; if the CUDA kernel has padded its result, into the first elements."""
    if to.shape == value.shape:
        to.copy_(value)
    elif to.dim() == value.dim() and to.numel() >= value.numel() > 0:
        to[tuple(slice(0, size) for size in value.shape)].copy_(value)
    elif to.numel() == value.numel():
        to.copy_(value.reshape(to.shape))
