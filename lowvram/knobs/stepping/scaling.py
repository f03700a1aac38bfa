"""Clips gradients and divides them by the loss scale; used by every stepper.

Pascanu et al., "On the difficulty of training recurrent neural networks" (2013).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowvram.compat.torch_ops import multiply_all
from lowvram.config.errors import require
from lowvram.core.shards import local


def check_clip(clip: float | None) -> None:
    require(clip is None or clip > 0, "stepping.clip", clip, "null (off) or a norm above 0")


def is_plain(divisor: Tensor | float) -> bool:
    """Whether there is no loss scale. A tensor is one, whatever its value: with it an update may be skipped."""
    return isinstance(divisor, float) and divisor == 1.0


def factor(norm: Tensor, clip: float | None, divisor: Tensor | float) -> Tensor | None:
    """The factor (0-dim, on the norm's device) that divides gradients by `divisor` and clips their global norm to
    `clip`; None if they stay as they are.

    Args:
        norm: the global norm after the division.
    """
    if clip is not None:
        return torch.clamp(clip / (norm + 1e-6), max=1.0) / divisor
    return None if is_plain(divisor) else torch.ones_like(norm) / divisor


def rescale(gradients: list[Tensor], by: Tensor | None) -> None:
    """Multiply gradients, or this rank's shards of them, by a 0-dim tensor on their device."""
    if by is not None and gradients:
        with torch.no_grad():
            multiply_all([local(gradient) for gradient in gradients], by)
