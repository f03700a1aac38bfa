"""Rounding to bf16 that is right on average: up or down, with odds given by what lies between.

Rounding to the nearest loses every update below 1/512 of a weight; this one keeps it, on average (Gupta et al., "Deep
Learning with Limited Numerical Precision", 2015). The bit arithmetic is that of torchao's optimizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowvram.core.shards import local

LOW_BITS = 16  # of an fp32 number; those that bf16 drops


@torch.no_grad()
def stochastically(target: Tensor, exact: Tensor) -> None:
    """Write `exact` into the bf16 tensor `target`, each number rounded to one of its two neighbours.

    The noise comes from the default generator of the device of `exact`. What bf16 holds exactly stays, as do infinities
    and nan.
    """
    exact = local(exact).float()
    noise = torch.randint_like(exact, 2**LOW_BITS, dtype=torch.int32).mul_(exact.isfinite())
    bits = noise.add_(exact.view(torch.int32)).bitwise_and_(-(2**LOW_BITS))
    local(target).copy_(bits.view(torch.float32))


@contextmanager
def noise_of(device: torch.device, *numbers: int) -> Iterator[None]:
    """Inside it the device's default generator draws what belongs to these numbers, afterwards it goes on as if nothing
    had been drawn. So ranks whose generators differ round the copies of a weight alike, and rounding changes no
    dropout."""
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    try:
        yield
    finally:
        generator.set_state(before)
