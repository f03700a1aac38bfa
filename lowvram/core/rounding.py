"""How an update in fp32 reaches a weight in bf16. Rounding to nearest loses every update below 1/512 of a weight.

Stochastic rounding, up or down at random, keeps it on average: Gupta et al., "Deep Learning with Limited Numerical
Precision" (2015). The bit arithmetic is that of torchao's optimizers.
A correction beside the weight keeps it exactly: FlashOptim (2026), arXiv 2602.23349.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lowvram.compat.torch_modes import is_in_dispatch_mode
from lowvram.core import native
from lowvram.core.seeds import default_generator, seed_of
from lowvram.core.shards import local

NUMEL_AT_A_TIME = 2**22  # of a weight that are rounded at a time: 16 MiB for each temporary of 32 bits
LOW_BITS = 16  # the bits of an fp32 number that bf16 drops
CORRECTION = "correction"  # in the optimizer's state of a parameter, where its rounding keeps one
IN_C = Path(__file__).with_suffix(".c")
MOST_SEEDS = 2**30  # of `bits_at_random`, so that a seed and a place together fit into an int32


class Rounding(ABC):
    """How the optimizers of a rig keep the fp32 result of an update in a weight of fewer bits."""

    correction_dtype: torch.dtype | None = None  # of the tensor that is kept beside each weight; None: there is none

    @abstractmethod
    def write(self, weight: Tensor, correction: Tensor | None, exact: Tensor) -> None:
        """Write `exact` into the weight and its correction. Each may be a DTensor."""

    def restore(self, widened: Tensor, correction: Tensor | None) -> None:
        """Add to a weight, widened to fp32, what `write` has put into its correction. In place."""
        assert correction is None, "a rounding that keeps corrections must also restore them"


@final
class Stochastic(Rounding):
    """To one of both neighbours, at random."""

    def write(self, weight: Tensor, correction: Tensor | None, exact: Tensor) -> None:
        del correction
        stochastically(weight, exact)


@final
class Split(Rounding):
    """The upper 16 bits of an fp32 number, rounded to the nearest, are the weight; the next ones are the correction.

    Both together are the fp32 number itself with 16 bits of correction. With 8 they are that number rounded to 24 bits,
    off by at most 2**-16 of itself.

    Args:
        bits: of the correction: 8 or 16.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.correction_dtype = bits, {8: torch.int8, 16: torch.int16}[bits]
        self.dropped_bits = LOW_BITS - bits
        self.unit = 2**self.dropped_bits  # of the correction, in units of the last bit of an fp32 number

    @torch.no_grad()
    def write(self, weight: Tensor, correction: Tensor | None, exact: Tensor) -> None:
        assert correction is not None
        weight, correction, exact = local(weight), local(correction), local(exact).float()
        if weight.dtype is torch.bfloat16 and in_c(f"write_split_{self.bits}", [weight, correction], exact):
            return
        is_number = are_numbers(exact).to(torch.int32)
        bits = exact.view(torch.int32)
        bits = torch.add(bits, is_number, alpha=self.unit // 2).bitwise_and_(-self.unit)
        upper = torch.add(bits, is_number, alpha=2 ** (LOW_BITS - 1)).bitwise_and_(-(2**LOW_BITS))
        weight.copy_(upper.view(torch.float32))
        correction.copy_(bits.sub_(upper).mul_(is_number).bitwise_right_shift_(self.dropped_bits))

    @torch.no_grad()
    def restore(self, widened: Tensor, correction: Tensor | None) -> None:
        assert correction is not None
        widened, correction = local(widened), local(correction)
        if not in_c(f"restore_split_{self.bits}", [widened], correction):
            bits = widened.view(torch.int32)
            bits.add_(correction.to(bits.device, torch.int32), alpha=self.unit)


def in_c(function: str, written: list[Tensor], *read: Tensor) -> bool:
    """Call a function of rounding.c. Not inside a dispatch mode, which is to see what torch's operators need. Returns
    whether it was called."""
    if is_in_dispatch_mode() or not native.run(IN_C, function, *written, *read, written[0].numel()):
        return False
    increment_version(written)
    return True


def forget(states: MutableMapping[Tensor, dict[str, Any]], parameter: Tensor) -> None:
    """Remove an optimizer's state of a parameter, apart from a correction, which is part of the weight."""
    if (state := states.pop(parameter, None)) is not None and CORRECTION in state:
        states[parameter] = {CORRECTION: state[CORRECTION]}


@torch.no_grad()
def stochastically(target: Tensor, exact: Tensor) -> None:
    """Write `exact` into the bf16 tensor `target`, each number rounded to one of its two neighbours.

    The noise comes from the default generator of the device of `exact`, for some rows at a time. Numbers that bf16
    holds exactly, infinities and nan stay as they are.
    """
    for target_rows, exact_rows in zip(*(rows_of(local(tensor)) for tensor in (target, exact)), strict=True):
        wide_rows = exact_rows.float()
        noise = torch.randint_like(wide_rows, 2**LOW_BITS, dtype=torch.int32)
        if target_rows.dtype is torch.bfloat16 and in_c("write_stochastically", [target_rows], wide_rows, noise):
            continue
        bits = noise.mul_(are_numbers(wide_rows)).add_(wide_rows.view(torch.int32)).bitwise_and_(-(2**LOW_BITS))
        target_rows.copy_(bits.view(torch.float32))


def are_numbers(values: Tensor) -> Tensor:
    """False for nan, whose bits must not be rounded up: that can overflow. Those of infinities stay as they are."""
    return values.eq(values)


def rows_of(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor in runs of rows, of about `NUMEL_AT_A_TIME` elements."""
    if tensor.numel() <= NUMEL_AT_A_TIME:
        return [tensor]
    return tensor.split(max(1, NUMEL_AT_A_TIME * len(tensor) // max(1, tensor.numel())))


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
