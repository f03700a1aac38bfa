"""Fingerprints of tensors: a few numbers that differ where the values do, apart from rounding.

They tell whether a repetition of a forward pass computed what the first one did. Kernels whose order of summation
varies round differently each time, so that bits can't be compared.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowvram.compat.torch_autograd import has_own_operators
from lowvram.compat.torch_modes import without_dispatch_modes

SIDE = 4  # elements of a sample along each dimension
WHOLE_SIDE = 24  # the same where whole numbers are summed
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative
HALF_TOLERANCE = 2e-2


class Fingerprint(NamedTuple):
    """Of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    sums: list[float]  # of all elements, of their absolute values
    sample: list[float]  # elements from all over the tensor

    def is_same(self, other: Fingerprint) -> bool:
        """Whether two tensors have the same values, apart from rounding."""
        if self[:2] != other[:2]:
            return False
        is_float = self.dtype.is_floating_point or self.dtype.is_complex
        tolerance = TOLERANCES.get(self.dtype, HALF_TOLERANCE) if is_float else 0.0
        return are_near(self.sums, other.sums, tolerance) and are_near(self.sample, other.sample, tolerance)


def are_near(some: list[float], others: list[float], tolerance: float) -> bool:
    """Whether numbers differ by at most this share of the largest of them."""
    largest = max((abs(each) for each in (*some, *others) if math.isfinite(each)), default=0.0)
    pairs = zip(some, others, strict=True)
    return all(
        one == other or (math.isnan(one) and math.isnan(other)) or abs(one - other) <= tolerance * largest
        for one, other in pairs
    )


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """Its fingerprint; None if it has no values that could be read, as fake tensors, shards and packed numbers."""
    if has_own_operators(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    with suppress(RuntimeError), without_dispatch_modes(), torch.no_grad():  # NotImplementedError is one
        if tensor.numel() and not tensor.untyped_storage().nbytes():  # its memory is given back for the time being
            return None
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
        return Fingerprint(tensor.shape, tensor.dtype, *numbers_of(plain))
    return None


def numbers_of(tensor: Tensor) -> tuple[list[float], list[float]]:
    """The sums, and a sample; without a copy of the whole tensor, which could be large."""
    if not tensor.numel():
        return [], []
    sample = sample_of(tensor, SIDE).flatten()
    if not tensor.is_floating_point():  # sums of these, and others than the following, take a copy in their own format
        return [float(sample_of(tensor, WHOLE_SIDE).sum(dtype=torch.int64))], sample.tolist()
    is_short = tensor.dtype is torch.float16 or (tensor.is_cuda and tensor.dtype.itemsize < 4)
    fine = torch.float32 if is_short else None
    sums = torch.stack([tensor.sum(dtype=fine), torch.linalg.vector_norm(tensor, 1, dtype=fine)])
    numbers = torch.cat([sums.to(torch.float64), sample.to(torch.float64)]).tolist()
    return numbers[:2], numbers[2:]


def sample_of(tensor: Tensor, side: int) -> Tensor:
    """A view of elements from all over a tensor, at most `side` along each dimension."""
    steps: list[Any] = [slice(None, None, -(-size // side)) for size in tensor.shape]
    return tensor[tuple(steps)]
