"""Shape functions for private operators of torch whose own ones are wrong or accept less than their kernels do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowvram.compat.torch_modes import without_dispatch_modes

ENOUGH = 2**16  # elements of the states of all steps of the longer input from which a workspace's growth is derived
ROW_BYTES = 16  # rows of the results of grouped products begin at multiples of it


def grouped_mm(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """An empty result of torch.nn.functional.grouped_mm, which mixtures of experts call.

    torch.ops.aten._grouped_mm, since 2.8: its kernels take fp32 and fp16, too, its shape function (2.13) only bf16.
    Replaced by nothing, once that takes what the kernels take.

    Args:
        one, other: (m, k) or (groups, m, k), and (k, n) or (groups, k, n).
        offs: (groups,) where a dimension is divided into groups.
    """
    rows, columns, dtype = one.shape[-2], other.shape[-1], out_dtype or one.dtype
    unit = ROW_BYTES // dtype.itemsize
    width = -(-columns // unit) * unit
    if one.dim() != other.dim():
        return one.new_empty_strided((rows, columns), (width, 1), dtype=dtype)
    groups = one.shape[0] if offs is None else offs.shape[0]
    return one.new_empty_strided((groups, rows, columns), (rows * width, width, 1), dtype=dtype)


def recurrent_layer(
    input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty results of a layer of torch.nn.LSTM on a CPU: the output, both states, and the workspace that oneDNN keeps
    for the backward pass. (Without gradients the real one has no workspace; this one is then freed at once.)

    torch.ops.aten.mkldnn_rnn_layer, since 2.0: its shape function (2.13) returns an empty workspace. Replaced by
    nothing, once that has its size.

    Args:
        input: (steps, samples, features).
    """
    num_steps, num_samples, num_features = input.shape
    width = h.shape[-1]
    num_bytes = workspace_bytes(num_steps, num_samples, num_features, width, input.dtype)
    workspace = input.new_empty(num_bytes, dtype=torch.uint8)
    return input.new_empty(num_steps, num_samples, width), h.new_empty(h.shape), c.new_empty(c.shape), workspace


def workspace_bytes(num_steps: int, num_samples: int, num_features: int, width: int, dtype: torch.dtype) -> int:
    """The bytes of oneDNN's workspace for an LSTM, extrapolated from real workspaces for two short inputs: they grow
    evenly with the steps, except for pieces that are rounded up to pages, which matter less the longer the second
    input is.

    torch.ops.aten.mkldnn_rnn_layer, since 2.0. Replaced like `recurrent_layer`.
    """
    more = max(1, ENOUGH // (num_samples * width))
    first, second = (real_workspace_bytes(num, num_samples, num_features, width, dtype) for num in (1, 1 + more))
    return first + (num_steps - 1) * (second - first) // more


@cache
def real_workspace_bytes(num_steps: int, num_samples: int, num_features: int, width: int, dtype: torch.dtype) -> int:
    """The bytes of oneDNN's workspace for an LSTM, from a run of the operator on real tensors.

    torch.ops.aten.mkldnn_rnn_layer, since 2.0. Replaced like `recurrent_layer`.
    """
    gates = 4 * width
    shapes = (num_steps, num_samples, num_features), (gates, num_features), (gates, width), (gates,), (gates,)
    states = [(num_samples, width)] * 2
    with without_dispatch_modes():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (*shapes, *states)]
        is_training, lstm = True, 2
        results = torch.ops.aten.mkldnn_rnn_layer.default(
            *tensors, False, [], lstm, width, 1, True, False, False, is_training
        )
    return results[3].nbytes


RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: grouped_mm,
    torch.ops.aten.mkldnn_rnn_layer.default: recurrent_layer,
}
