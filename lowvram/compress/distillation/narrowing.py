"""Brings what the teacher's blocks return to the width of the student's, where it has another one.

Along fixed random directions, orthogonal to each other: they keep lengths and angles nearly (Johnson and Lindenstrauss,
1984), nothing about them is learned, and they are the same in every run. FitNets and TinyBERT learn a layer instead,
which has to be trained, saved and taken off the student afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compress.distillation.matching import IMAGE_NDIM, Partner
from lowvram.core.seeds import generator_for

NARROWING = "lowvram_narrowing"  # among the teacher's modules: its own may have any other name


@final
class Narrowing(nn.Module):
    """The directions for all partners, as buffers: (width of the student, width of the teacher) each. Blocks of the
    same widths share them."""

    def __init__(self, partners: Iterable[Partner]) -> None:
        super().__init__()
        for theirs, ours in sorted({(each.width, each.student_width) for each in partners}):
            if theirs != ours:
                self.register_buffer(name_of(theirs, ours), torch.empty(ours, theirs, device="meta"))

    def forward(self, states: Tensor, partner: Partner) -> Tensor:
        """(samples, tokens, width), or (samples, width, height, width of the image), in the width of the student."""
        if partner.width == partner.student_width:
            return states
        directions = self.get_buffer(name_of(partner.width, partner.student_width)).to(states.dtype)
        if states.dim() > IMAGE_NDIM:
            return F.conv2d(states, directions[:, :, None, None])
        return F.linear(states, directions)


def name_of(theirs: int, ours: int) -> str:
    return f"from_{theirs}_to_{ours}"


def fill_directions(name: str, directions: Tensor) -> None:
    """Directions for which a state's mean square stays as it was, on average."""
    ours, theirs = directions.shape
    noise = torch.randn(max(ours, theirs), min(ours, theirs), generator=generator_for(0, name, torch.device("cpu")))
    orthonormal = torch.linalg.qr(noise).Q
    directions.copy_(orthonormal if ours > theirs else orthonormal.T)
    directions.mul_(sqrt(max(1.0, ours / theirs)))
