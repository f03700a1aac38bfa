"""Operators that stand for their families when a device is measured, each as models have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowvram.planning.time.op_class import Family

Run = Callable[[], Any]
FEATURES, CHANNELS, HEADS, KERNEL = 128, 32, 4, 3


@dataclass(frozen=True)
class Sample:
    """An operator that stands for its family. Sizes are powers of two, the smallest first."""

    family: Family
    make: Callable[[int, torch.dtype, torch.device], Run]
    on_cpu: tuple[int, ...]
    on_card: tuple[int, ...]


def moving(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Numbers that lie side by side, and some that don't, as those of heads."""
    one, other = (torch.ones(num // FEATURES, FEATURES, dtype=dtype, device=device) for _ in range(2))
    halves = one.view(-1, 4, 2, FEATURES // 8).unbind(2)
    return lambda: (one + other, halves[0] * halves[1], torch.cat(halves, -1))


def function(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    numbers = torch.randn(num, device=device).to(dtype)
    return lambda: F.gelu(numbers, approximate="tanh")


def norm(num: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Over the features of a token, and over the samples of a channel."""
    rows, weight = torch.randn(num // FEATURES, FEATURES, device=device).to(dtype), torch.ones(FEATURES, device=device)
    images, weights = rows.view(-1, CHANNELS, 8, 8), (weight.to(dtype), weight[:CHANNELS].to(dtype))

    def run() -> tuple[Tensor, Tensor]:
        by_token = F.layer_norm(rows, (FEATURES,), weights[0], weights[0])
        return by_token, F.batch_norm(images, None, None, weights[1], weights[1], training=True)

    return run


def product(width: int, dtype: torch.dtype, device: torch.device) -> Run:
    """The three of a wide layer and many tokens: its output, and what its backward pass multiplies."""
    x = torch.randn(16 * width, width, device=device).to(dtype)
    weight = torch.randn(4 * width, width, device=device).to(dtype)
    bias = torch.zeros(4 * width, dtype=dtype, device=device)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out = F.linear(x, weight, bias)
        return out, out @ weight, out.T @ x

    return run


def convolution(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    inputs, weight = convolved(num_samples, dtype, device)
    return lambda: F.conv2d(inputs, weight, padding=1)


def convolution_backward(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    inputs, weight = (tensor.requires_grad_() for tensor in convolved(num_samples, dtype, device))
    return backward(F.conv2d(inputs, weight, padding=1), [inputs, weight])


def convolved(num_samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A few channels on a CPU, as small models have; many on a card."""
    channels, side = (4 * CHANNELS, 28) if device.type == "cuda" else (CHANNELS, 16)
    inputs = torch.randn(num_samples, channels, side, side, device=device).to(dtype)
    return inputs, torch.randn(channels, channels, KERNEL, KERNEL, device=device).to(dtype)


def attention(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    query, key, value = attended(num_samples, dtype, device)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_backward(num_samples: int, dtype: torch.dtype, device: torch.device) -> Run:
    query, key, value = (tensor.requires_grad_() for tensor in attended(num_samples, dtype, device))
    return backward(F.scaled_dot_product_attention(query, key, value, is_causal=True), [query, key, value])


def attended(num_samples: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """(samples, heads, length, width): query, key and value."""
    length, width = (1024, 64) if device.type == "cuda" else (128, 32)
    shape = (num_samples, HEADS, length, width)
    return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]


def backward(out: Tensor, inputs: list[Tensor]) -> Run:
    """Gradients of the same result, again and again."""
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


SAMPLES = [
    Sample(Family.MOVING, moving, (13, 17, 21), (18, 22, 25)),
    Sample(Family.FUNCTION, function, (13, 17, 20), (18, 22, 25)),
    Sample(Family.NORM, norm, (13, 17, 20), (18, 22, 25)),
    Sample(Family.PRODUCT, product, (4, 6, 7), (6, 8, 10)),
    Sample(Family.CONVOLUTION, convolution, (0, 3, 5), (2, 6)),
    Sample(Family.CONVOLUTION_BACKWARD, convolution_backward, (0, 3, 5), (2, 6)),
    Sample(Family.ATTENTION, attention, (0, 3), (2, 5)),
    Sample(Family.ATTENTION_BACKWARD, attention_backward, (0, 3), (2, 5)),
]
