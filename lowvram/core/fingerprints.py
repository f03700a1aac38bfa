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

SIDE = 4  # at most so many elements along each dimension are looked at
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
    """The sums, and a sample; without a copy of the whole tensor where that could be large."""
    if not tensor.numel():
        return [], []
    steps: list[Any] = [slice(None, None, -(-size // SIDE)) for size in tensor.shape]
    sample = tensor[tuple(steps)].flatten()
    if not tensor.is_floating_point():
        return [float(tensor.sum(dtype=torch.int64))], sample.tolist()
    # On a CPU, sums in another format than the tensor's take a copy of it.
    fine = None if tensor.device.type == "cpu" and tensor.dtype.itemsize >= 4 else torch.float64
    sums = torch.stack([tensor.sum(dtype=fine), torch.linalg.vector_norm(tensor, 1, dtype=fine)])
    numbers = torch.cat([sums.to(torch.float64), sample.to(torch.float64)]).tolist()
    return numbers[:2], numbers[2:]
