"""Private names of torchao."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def new_moment(optimizer: Any, like: Tensor, signed: bool) -> Tensor:
    """A moment (a running average of Adam), zero, as torchao's low-bit optimizers keep it: codes and scales, or plain
    numbers if the tensor is too small for blocks of codes.

    torchao.optim's _new_buffer, since 0.4 (in torchao.prototype, before 0.11): the classes of such tensors are public,
    but not which of them an optimizer uses, and when. Replaced by nothing, once its state can be made before its first
    step.

    Args:
        signed: whether values may be negative: true for the mean of gradients, false for that of their squares.
    """
    return optimizer._new_buffer(like, signed)
