"""Private names of torch's FlexAttention, compiled without torch.compile.

torch.nn.attention.flex_attention.flex_attention is public, but only inside torch.compile it is a kernel, and its
forward and its backward pass can't be called apart. An operator of our own needs both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# As flex_attention passes them (_apply_kernel_options, torch 2.11 and 2.13). BACKEND: not the kernel for few queries,
# which allocates more.
OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def flex_forward(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """The output (b, n, t, c), and for `flex_backward` the logarithm to the base 2 of each query's sum in the softmax,
    (b, n, t).

    torch.ops.higher_order.flex_attention, since 2.5, and BlockMask.as_tuple. Replaced by the public function, once it
    takes part in autograd without torch.compile.

    Args:
        mask: a torch.nn.attention.flex_attention.BlockMask.
    """
    attend = torch.ops.higher_order.flex_attention
    return attend(q_bntc, k_bntc, v_bntc, lambda score, *_: score, mask.as_tuple(), q_bntc.shape[-1] ** -0.5, OPTIONS)[
        :2
    ]


def flex_backward(
    grad_bntc: Tensor, q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, y_bntc: Tensor, sums_bnt: Tensor, mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values.

    torch.ops.higher_order.flex_attention_backward, since 2.5: see `flex_forward`. Replaced with that.

    Args:
        y_bntc, sums_bnt: what `flex_forward` returned.
    """
    attend = torch.ops.higher_order.flex_attention_backward
    inputs = (q_bntc, k_bntc, v_bntc, y_bntc, sums_bnt, grad_bntc, None)
    # What is made of a score, and the gradients by it and by its places (sample, head, query, key).
    score_and_gradients = (lambda score, *_: score, lambda *args: [args[-1], None, None, None, None])
    return attend(*inputs, *score_and_gradients, mask.as_tuple(), q_bntc.shape[-1] ** -0.5, OPTIONS)[:3]


def compiled(function: Callable[..., Any], examples: list[Tensor]) -> Callable[..., Any]:
    """The function as kernels, for tensors with the metadata of `examples`. Their values aren't read. Kernels aren't
    tried out first, which would take memory of the card.

    torch.fx.experimental.proxy_tensor.make_fx and torch._inductor.compile, since 2.0, with the option "deterministic"
    since 2.10: torch.compile can't trace the backward operator (2.11). Replaced by torch.compile, once that can.
    """
    import torch._inductor as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    to_kernels: Any = inductor.compile
    return to_kernels(make_fx(function, tracing_mode="fake")(*examples), examples, options={"deterministic": True})
