"""CPU tensors over the memory of CUDA tensors: device memory is memory of the host here."""

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
    """An argument as the CPU's kernel takes it."""
    if isinstance(value, Tensor):
        return over(value) if value.device.type == "cuda" and is_strided(value) else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value  # the CPU's own draws random numbers


def in_fp32(value: Any) -> Any:
    """For operators that the CPU has not in 16 bits."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def as_tensor(value: Any, others: list[Tensor]) -> Any:
    """A Python number in the place of a tensor, which the dispatcher had unwrapped: a tensor again, of a format that
    changes no result's."""
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
    """The CPU's result into memory, both CPU tensors; where the CUDA kernel pads its result, into the first of it."""
    if to.shape == value.shape:
        to.copy_(value)
    elif to.dim() == value.dim() and to.numel() >= value.numel() > 0:
        to[tuple(slice(0, size) for size in value.shape)].copy_(value)
    elif to.numel() == value.numel():
        to.copy_(value.reshape(to.shape))
