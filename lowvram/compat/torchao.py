"""Private names of torchao."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def new_moment(optimizer: Any, like: Tensor, signed: bool) -> Tensor:
    """Room for a moment as one of torchao's low-bit optimizers keeps it: codes and scales, or numbers where a tensor is
    too small for blocks of codes.

    torchao.optim's _new_buffer, since 0.4 (in torchao.prototype, before 0.11): the classes of codes are public, which
    of them an optimizer takes, and when, isn't. Replaced by nothing, once its state can be made before its first step.

    Args:
        signed: whether it may be negative: a mean of gradients, not of their squares.
    """
    return optimizer._new_buffer(like, signed)
