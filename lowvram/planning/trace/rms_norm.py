"""RMS norms as on a card: one operator, which keeps its input and a number for each row. (On a CPU torch composes a
norm of several operators, each with a result of its own.)

With these kernels torch's own `rms_norm` and its gradients take the same way for CPU tensors as on a card
(PyTorch's aten/src/ATen/native/layer_norm.cpp, torch 2.13): a norm whose weight has another format than its input is
composed there, too. Fake tensors have torch's own shapes; models that are tried out on real ones while they are planned
get the values that are computed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The norm of `input` over its last dimensions, and the reciprocal of each row's root mean square."""
    wide = widened(input)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    factors = (wide.square().mean(last(normalized_shape), keepdim=True) + eps).rsqrt()
    found = wide * factors
    return (found if weight is None else found * weight).to(input.dtype).contiguous(), factors


def rms_norm_backward(
    gradient: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    factors: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, where `output_mask` asks for them."""
    normed, wide = widened(input) * factors, widened(gradient)
    weighted = wide if weight is None else wide * weight
    of_input = factors * (weighted - normed * (weighted * normed).mean(last(normalized_shape), keepdim=True))
    of_weight = None
    if weight is not None and output_mask[1]:
        of_weight = (wide * normed).sum_to_size(normalized_shape).to(weight.dtype)
    return (of_input.to(input.dtype) if output_mask[0] else None), of_weight


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def last(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))
