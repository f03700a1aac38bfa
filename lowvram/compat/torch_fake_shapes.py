"""Results without values, for private operators of torch whose own shape functions are narrower than their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROW_BYTES = 16  # rows of grouped products begin at multiples of it


def grouped_mm(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What torch.nn.functional.grouped_mm returns, which mixtures of experts call.

    torch.ops.aten._grouped_mm, since 2.8: its kernels take fp32 and fp16, too, its shape function (2.13) bf16 alone.
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


RESULTS: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_mm}
