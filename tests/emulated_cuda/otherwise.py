"""The values of CUDA operators that the CPU doesn't have, or has with other arguments or results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.emulated_cuda.overlay import in_fp32

aten = torch.ops.aten


def probabilities(
    q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax of the scores (batch, heads, queries, keys) in fp32, and their logsumexp."""
    scores = in_fp32(q) @ in_fp32(k).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        num_queries, num_keys = scores.shape[-2:]  # those of the last tokens
        scores = scores + torch.full((num_queries, num_keys), float("-inf")).triu(1 + num_keys - num_queries)
    if bias is not None:
        scores = scores + in_fp32(bias)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp(), logsumexp


def repeated(heads: Tensor, like: Tensor) -> Tensor:
    """Keys or values of grouped heads, once for each head of the queries."""
    times = like.shape[1] // heads.shape[1]
    return heads.repeat_interleave(times, 1) if times > 1 else heads


def attention(bias_place: int | None, causal_place: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """One of torch's fused attention operators.

    Args:
        bias_place: the position of the attention bias among the arguments after q, k and v; None: there is none.
        causal_place: the position of is_causal among them.
    """

    def computed(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None, **more: Any) -> Any:
        bias = rest[bias_place] if bias_place is not None and len(rest) > bias_place else None
        is_causal = rest[causal_place] if len(rest) > causal_place else more.get("is_causal", False)
        weights, logsumexp = probabilities(q, repeated(k, q), bias, is_causal, scale)
        return weights @ in_fp32(repeated(v, q)), logsumexp

    return computed


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = probabilities(q, repeated(k, q), bias, is_causal, scale)
    grad, factor = in_fp32(grad), q.shape[-1] ** -0.5 if scale is None else scale
    weights_grad = grad @ in_fp32(repeated(v, q)).transpose(-1, -2)
    scores_grad = weights * (weights_grad - (weights_grad * weights).sum(-1, keepdim=True))
    q_grad = scores_grad @ in_fp32(repeated(k, q)) * factor
    k_grad = scores_grad.transpose(-1, -2) @ in_fp32(q) * factor
    v_grad = weights.transpose(-1, -2) @ grad
    return q_grad, gathered(k_grad, k), gathered(v_grad, v)


def gathered(grad: Tensor, heads: Tensor) -> Tensor:
    """The inverse of `repeated` for gradients."""
    batch, number = heads.shape[:2]
    return grad if grad.shape[1] == number else grad.view(batch, number, -1, *grad.shape[2:]).sum(2)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """rest: out, logsumexp, two cumulative lengths, two maximum lengths, dropout, is_causal."""
    return attention_backward(grad, q, k, v, None, rest[7], scale)


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *rest: Any,
    scale: float | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """rest: out, logsumexp, seed, offset, dropout, mask of needed gradients, is_causal."""
    is_causal = rest[6] if len(rest) > 6 else more.get("is_causal", False)
    return attention_backward(grad, q, k, v, bias, is_causal, scale)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """rest: out, logsumexp, seed, offset, bias, two cumulative lengths, two maximum lengths, dropout, is_causal."""
    return attention_backward(grad, q, k, v, rest[4], rest[10], scale)


def convolution(
    x: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int], groups: int, *_: Any
) -> Tensor:
    none = [0] * len(padding)
    return aten.convolution(in_fp32(x), in_fp32(weight), None, stride, padding, dilation, False, none, groups)


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return aten.convolution_backward(in_fp32(grad), in_fp32(x), in_fp32(weight), *rest)


def batch_norm(x: Tensor, *rest: Any) -> Any:
    return aten.native_batch_norm(in_fp32(x), *rest)


def batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    inverse: Tensor,
    epsilon: float,
    *_: Any,
) -> Any:
    more = (weight, running_mean, running_var, mean, inverse, True, epsilon, [True, True, True])
    return aten.native_batch_norm_backward(in_fp32(grad), in_fp32(x), *more)


def log_softmax(x: Tensor, dim: int, _: bool) -> Tensor:
    """Only CUDA has it with a half-precision input and an fp32 output."""
    return aten._log_softmax(in_fp32(x), dim, False)


def softmax(x: Tensor, dim: int, _: bool) -> Tensor:
    return aten._softmax(in_fp32(x), dim, False)


def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, _: torch.dtype) -> Tensor:
    return aten._log_softmax_backward_data(in_fp32(grad), in_fp32(out), dim, in_fp32(out).dtype)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, _: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(in_fp32(grad), in_fp32(out), dim, in_fp32(out).dtype)


def log_softmax_out(x: Tensor, dim: int, _: bool, *, out: Tensor) -> Tensor:
    return out.copy_(aten._log_softmax(in_fp32(x), dim, False))


def softmax_out(x: Tensor, dim: int, _: bool, *, out: Tensor) -> Tensor:
    return out.copy_(aten._softmax(in_fp32(x), dim, False))


def product(one: Tensor, other: Tensor, _: torch.dtype) -> Tensor:
    """The product of 16-bit matrices in fp32."""
    return in_fp32(one) @ in_fp32(other)


OTHERWISE: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": attention(None, 1),
    "_scaled_dot_product_efficient_attention": attention(0, 3),
    "_scaled_dot_product_cudnn_attention": attention(0, 3),
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "cudnn_convolution": convolution,
    "cudnn_batch_norm": batch_norm,
    "cudnn_batch_norm_backward": batch_norm_backward,
    "convolution_backward": convolution_backward,
    "_log_softmax": log_softmax,
    "_softmax": softmax,
    "_log_softmax.out": log_softmax_out,
    "_softmax.out": softmax_out,
    "mm.dtype": product,
    "bmm.dtype": product,
    "_log_softmax_backward_data": log_softmax_backward,
    "_softmax_backward_data": softmax_backward,
}
