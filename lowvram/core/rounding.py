"""Stochastic rounding: up or down at random, so that the result is right on average.

Rounding to nearest loses every update below 1/512 of a weight; stochastic rounding keeps it on average (Gupta et al.,
"Deep Learning with Limited Numerical Precision", 2015). The bit arithmetic is that of torchao's optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowvram.core.seeds import default_generator, seed_of
from lowvram.core.shards import local

LOW_BITS = 16  # the bits of an fp32 number that bf16 drops


@torch.no_grad()
def stochastically(target: Tensor, exact: Tensor) -> None:
    """Write `exact` into the bf16 tensor `target`, each number rounded to one of its two neighbours.

    The noise comes from the default generator of the device of `exact`. Numbers that bf16 holds exactly, infinities and
    nan stay as they are.
    """
    exact = local(exact).float()
    noise = torch.randint_like(exact, 2**LOW_BITS, dtype=torch.int32).mul_(exact.isfinite())
    bits = noise.add_(exact.view(torch.int32)).bitwise_and_(-(2**LOW_BITS))
    local(target).copy_(bits.view(torch.float32))


@contextmanager
def noise_of(device: torch.device, *numbers: int) -> Iterator[None]:
    """Inside it the device's default generator is seeded by `numbers`; afterwards it continues as if nothing had been
    drawn. So all ranks round their copies of a weight alike, whatever their generators' state, and rounding doesn't
    change later dropout masks."""
    generator = default_generator(device)
    before = generator.get_state()
    generator.manual_seed(seed_of(repr(numbers)))
    try:
        yield
    finally:
        generator.set_state(before)


def bits_at_random(numel: int, seed: int, device: torch.device) -> Tensor:
    """(numel,) int32: 24 bits each, at random, that depend on the seed and the place alone. The same on every device,
    in any piece (of the seed `seed + start`) and inside a compiled kernel, without a generator's state.

    Wellons, "Prospecting for Hash Functions" (2018): lowbias32.
    """
    bits = torch.arange(numel, dtype=torch.int32, device=device) + seed
    for shift, kept, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, -0x7B935975), (16, 0xFFFF, 1)):
        bits = (bits ^ ((bits >> shift) & kept)) * factor  # `kept`: a shift fills up with the sign
    return bits & 0xFFFFFF
